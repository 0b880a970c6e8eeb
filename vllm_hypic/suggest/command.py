"""``vllm-hypic suggest LOG.jsonl``: recommends a way of finding segments for recorded requests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO

import click
from rich.console import Console
from rich.progress import wrap_file

from ..config.engine import SECTION, HypicConfig
from ..harness.report import console, percent, table
from ..harness.settings import HypicOptions, JsonObject, model_folder
from ..primitives.policies import parse_link

if TYPE_CHECKING:
    from .candidates import Candidate, Comparison
    from .prompts import FrontEnd

OURS = ("model", "tokenizer_mode", "quantization", "skip_tokenizer_init")
"""Arguments of vLLM that the command sets itself."""


@click.command()
@click.argument("log", type=click.File("rb"))
@click.option(
    "--model", required=True, help="A model's folder, or its name in the hub's cache. No weights are read."
)
@click.option("--chat-template", help="vLLM's option --chat-template: a file, or the template.")
@click.option(
    "--hypic",
    type=HypicOptions(),
    default="{}",
    show_default=True,
    help="Options of the plugin, as JSON: the server's link method and seams, and min_tokens of segment.",
)
@click.option(
    "--engine-args",
    type=JsonObject(OURS),
    default="{}",
    show_default=True,
    help='Arguments of vLLM, as JSON: {"max_model_len": 8192}.',
)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Tokens in a block of vLLM's prefix cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def suggest(
    log: BinaryIO,
    model: str,
    chat_template: str | None,
    hypic: dict[str, Any],
    engine_args: dict[str, Any],
    block_size: int,
    as_json: bool,
) -> None:
    """Replay recorded requests, and print the tokens that each search for segments would reuse.

    LOG has a request's body in JSON on each line (- reads standard input): of /v1/chat/completions or
    /v1/completions, or lines of OpenAI's batch files. The command renders and cuts prompts as a server of
    MODEL does, assumes unlimited memory, recommends a mode, and starts no engine.
    """
    folder, config = model_folder(model), HypicConfig.from_mapping(hypic)
    if not parse_link(config.link, config.seam_tokens).reuse:
        raise click.UsageError(f"link method {config.link!r} reuses nothing: set another link in --hypic")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to the standard output
    from vllm.exceptions import VLLMError

    from .prompts import FrontEnd

    try:
        front_end = FrontEnd(folder, config, chat_template, engine_args)
    except (VLLMError, ValueError, TypeError, OSError) as e:
        raise click.UsageError(str(e)) from e
    with front_end:
        comparison = comparison_of(front_end, config, block_size)
        left_out = _replay(log, front_end, comparison)
    if not comparison.prompts:
        raise click.ClickException(f"{log.name}: no prompts of text alone; {left_out} requests left out")
    found = _report(comparison, left_out, block_size, hypic)
    click.echo(json.dumps(found, indent=2)) if as_json else _show(found)


def comparison_of(front_end: FrontEnd, config: HypicConfig, block_size: int) -> Comparison:
    """Return a comparison for prompts of ``front_end``; ``block_size``: tokens in a prefix cache's block."""
    from ..engine.segments import Vocabulary
    from ..primitives.context import context_tokens
    from ..primitives.islands import choose_islands
    from ..primitives.windows import Words
    from .candidates import Comparison
    from .replay import Linking

    config = config.for_model(front_end.model_config)
    vocabulary = Vocabulary(front_end.tokenizer)
    words = Words(vocabulary.texts.of, vocabulary.special)
    linking = Linking(
        parse_link(config.link, config.seam_tokens, config.context, config.islands),
        config.min_segment_tokens,
        front_end.model_config.max_model_len,
        context_tokens(front_end.tokenizer, config.text),
        lambda interiors, query, budget: choose_islands(interiors, query, budget, words),
        words.question_in,
    )
    return Comparison(vocabulary, front_end.primitives, config.segment, linking, block_size)


def _replay(log: BinaryIO, front_end: FrontEnd, comparison: Comparison) -> int:
    """Replay the log's prompts, and return the number of requests without a prompt to replay."""
    from .prompts import LogError, body_of

    left_out = 0
    for n, line in enumerate(_lines(log), start=1):
        if not line.strip():
            continue
        try:
            prompts = list(front_end.prompts(body_of(line)))
        except LogError as e:
            raise click.ClickException(f"{log.name}, line {n}: {e}") from e
        left_out += not prompts
        for prompt in prompts:
            comparison.add(prompt)
    return left_out


def _lines(log: BinaryIO) -> Iterator[bytes]:
    """Yield the log's lines, with a progress bar on a terminal if the log's length is known."""
    with ExitStack() as stack:
        if sys.stderr.isatty() and log.seekable():
            size = os.fstat(log.fileno()).st_size
            bar = wrap_file(
                log,
                size,
                description="replay",
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=2,
            )
            log = stack.enter_context(bar)
        yield from log


def _report(comparison: Comparison, left_out: int, block_size: int, hypic: dict[str, Any]) -> dict[str, Any]:
    """Return the report as JSON values."""
    from .candidates import recommended

    candidates = comparison.candidates()
    chosen = recommended(candidates)

    def config_of(candidate: Candidate) -> dict[str, Any] | None:
        if candidate.options is None:
            return None
        return {SECTION: {**hypic, "segment": {**hypic.get("segment", {}), **candidate.options}}}

    return {
        "prompts": comparison.prompts,
        "prompt_tokens": chosen.replay.tokens,
        "with_separators": comparison.with_separators,
        "tenants": len(comparison.tenants),
        "requests_left_out": left_out,
        "block_size": block_size,
        "candidates": [
            {
                "name": c.name,
                "reused_tokens": c.replay.reused,
                "reuse": round(c.replay.reuse, 4),
                "in_segments": round(c.replay.share_in_segments, 4),
                "median_pieces": c.replay.median_pieces,
                "record_tokens": c.replay.record_tokens,
                "additional_config": config_of(c),
            }
            for c in candidates
        ],
        "recommended": chosen.name,
        "additional_config": config_of(chosen),
    }


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            c["name"],
            percent(c["reuse"]),
            percent(c["in_segments"]),
            f"{c['median_pieces']:g}",
            f"{c['record_tokens']:,}",
        )
        for c in found["candidates"]
    ]
    title = f"{found['prompts']:,} prompts, {found['prompt_tokens']:,} tokens, tenants: {found['tenants']}"
    columns = ("segment", "reused", "in segments", "pieces a prompt", "tokens of records")
    out = console()
    out.print(table(title, columns, rows))
    out.print(
        "The replay assumes unlimited memory. Reused tokens come from records, or from vLLM's prefix cache "
        f"(blocks of {found['block_size']}, without answers); tokens that seams recompute do not count.",
        soft_wrap=True,
    )
    if found["requests_left_out"]:
        out.print(f"Left out: {found['requests_left_out']} requests that contain more than text.")
    if found["additional_config"] is None:
        out.print("Recommended: none. vLLM's prefix cache alone reuses as much, and its answers are exact.")
    else:
        out.print(f"Recommended: {found['recommended']}", "--additional-config", sep="\n")
        out.print_json(json.dumps(found["additional_config"]), indent=None)
