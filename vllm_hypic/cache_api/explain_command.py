"""``vllm-hypic explain FILE``: prints, in colours, how the server would handle a request."""

from __future__ import annotations

import json
from typing import Any

import click
from msgspec import to_builtins
from rich.table import Table
from rich.text import Text

from .answers import Explanation, PromptPart, Run
from .client import SegmentCache
from .command import console, print_json, refusals_told, server_options

_STYLES = {
    "leading, cached": "black on bright_blue",
    "segment, cached": "black on green",
    "to be computed, then cached": "black on yellow",
    "recomputed each time": "black on magenta",
    "stream: exact": "default",
    "separators": "dim",
}
_VISIBLE = {c: 0x2400 + c for c in range(32) if c not in b"\t\n"} | dict.fromkeys(range(127, 160), 0x2421)
"""Visible pictures of control characters: text in a prompt must not control the terminal."""


@click.command()
@click.argument("file", type=click.File(encoding="utf-8"))
@server_options
def explain(
    file: Any, url: str, api_key: str | None, salt: str | None, timeout: float, as_json: bool
) -> None:
    """Print the parts of the request in FILE ("-" for stdin), and which of them are cached now.

    FILE holds the JSON body of a chat or completion request, or a prompt as plain text. The
    server generates nothing. It must run with VLLM_PLUGINS=hypic,hypic_cache.
    """
    try:
        text = file.read()
    except UnicodeDecodeError as e:
        raise click.BadParameter(f"{file.name!r} is not UTF-8 ({e})", param_hint="FILE") from e
    with refusals_told(), SegmentCache(url, api_key, salt, timeout_s=timeout) as cache:
        found = cache.explain(_body(text, file.name))
    if as_json:
        print_json(to_builtins(found))
        return
    out = console()
    out.print(_prompt(found), soft_wrap=True)
    out.print()
    out.print(Text("  ").join(Text(f" {name} ", style) for name, style in _STYLES.items()))
    out.print(_table(found))
    out.print(
        f"{found.prompt_tokens:,} tokens: {found.tokens_reused:,} reused, {found.tokens_prefix_cached:,} in "
        f"the prefix cache, {found.tokens_computed:,} to compute; mode {found.mode}, link {found.link}",
        highlight=False,
    )
    if pieces := ", ".join(f"{name} {n:,}" for name, n in found.pieces.items() if n):
        out.print(pieces, highlight=False)
    if found.reason is not None:
        out.print(Text(found.reason))


def _body(text: str, name: str) -> dict[str, Any]:
    """Return the request body in a file; text that is no request body becomes a prompt."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as e:
        if name.endswith(".json"):
            raise click.BadParameter(f"{name!r} is not JSON ({e})", param_hint="FILE") from e
        return {"prompt": text}
    if isinstance(body, dict) and body.keys() & {"messages", "prompt"}:
        return body
    if name.endswith(".json"):
        raise click.BadParameter(f"{name!r}: expected an object with messages or a prompt", param_hint="FILE")
    return {"prompt": text}


def _prompt(found: Explanation) -> Text:
    runs = (
        (run.text.translate(_VISIBLE), _STYLES[_fate(part, run)]) for part in found.parts for run in part.runs
    )
    return Text.assemble(*runs)


def _fate(part: PromptPart, run: Run) -> str:
    if part.kind == "stream":
        return "stream: exact"
    if part.kind == "primitive":
        return "separators"
    if run.recomputed:
        return "recomputed each time"
    if not part.reused:
        return "to be computed, then cached"
    return f"{part.kind}, cached"


def _table(found: Explanation) -> Table:
    table = Table("part", "tokens", "length", "recomputed", "record is", "key", "behind")
    for part in found.parts:
        again = sum(run.stop - run.start for run in part.runs if run.recomputed)
        keys = ((key or "")[:16] for key in (part.key, part.context))
        place = f"{part.start}-{part.stop}"
        table.add_row(
            part.kind, place, f"{part.stop - part.start:,}", f"{again:,}" if again else "", part.state, *keys
        )
    return table
