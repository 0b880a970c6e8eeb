"""``vllm-hypic cache ...``: compiled segments of a running server."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

import click
import httpx
from msgspec import to_builtins
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .answers import CacheStats, Segment
from .client import AS_IT_IS, CacheError, SegmentCache

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class _Session:
    """Values of the options of ``cache``."""

    cache: SegmentCache
    as_json: bool


SERVER_OPTIONS = (
    click.option(
        "--url",
        envvar="HYPIC_URL",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="The server's address.  [env: HYPIC_URL]",
    ),
    click.option("--api-key", envvar="VLLM_API_KEY", help="The server's --api-key.  [env: VLLM_API_KEY]"),
    click.option(
        "--salt",
        envvar="HYPIC_CACHE_SALT",
        help="The tenant: cache_salt of its requests.  [env: HYPIC_CACHE_SALT]",
    ),
    click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for an answer."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
)


def server_options(command: Callable[P, None]) -> Callable[P, None]:
    """Give a command the options ``url``, ``api_key``, ``salt``, ``timeout`` and ``as_json``."""
    return reduce(lambda inner, option: option(inner), reversed(SERVER_OPTIONS), command)


@contextmanager
def refusals_told() -> Iterator[None]:
    """Turn refusals of the server, and failed connections, into click errors of one line, exit code 1."""
    try:
        yield
    except CacheError as e:
        raise click.ClickException(str(e)) from e
    except httpx.TransportError as e:
        raise click.ClickException(f"the server cannot be reached: {e}") from e


@click.group()
@server_options
@click.pass_context
def cache(
    context: click.Context, url: str, api_key: str | None, salt: str | None, timeout: float, as_json: bool
) -> None:
    """Compile segments and manage them by their ids.

    The server must run with VLLM_PLUGINS=hypic,hypic_cache.
    """
    client = context.with_resource(SegmentCache(url, api_key, salt, timeout_s=timeout))
    context.obj = _Session(client, as_json)


def _command(function: Callable[Concatenate[_Session, P], None]) -> Callable[P, None]:
    """Call ``function`` with the session of ``cache``, and turn the server's refusals into click errors."""

    @wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        session = click.get_current_context().find_object(_Session)
        assert session is not None
        with refusals_told():
            function(session, *args, **kwargs)

    return told


@cache.command("compile")
@click.argument("text", required=False)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="File with the text; - for the standard input.",
)
@click.option("--tokens", help="Token ids as a JSON list.")
@click.option("--message", help='A chat message as JSON: {"role": "system", "content": "..."}.')
@click.option(
    "--role",
    type=click.Choice(["leading", "interior"]),
    help="Place of the segment; by default leading for system and developer messages, else interior.",
)
@click.option("--ttl", type=float, help="Seconds until the segment expires.")
@click.option("--pin", is_flag=True, help="Keep the segment's record in the pool.")
@_command
def compile_(
    session: _Session,
    text: str | None,
    file: Path | None,
    tokens: str | None,
    message: str | None,
    role: Any,
    ttl: float | None,
    pin: bool,
) -> None:
    """Compile TEXT, a file, tokens or a chat message, and print its id."""
    given = [v for v in (text, file, tokens, message) if v is not None]
    if len(given) != 1:
        raise click.UsageError(f"expected exactly one of TEXT, --file, --tokens, --message; got {len(given)}")
    if file is not None:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    segment = session.cache.compile(
        text,
        tokens=None if tokens is None else _json("--tokens", tokens, list),
        message=None if message is None else _json("--message", message, dict),
        role=role,
        ttl_s=AS_IT_IS if ttl is None else ttl,
        pinned=pin,
    )
    _show(session, segment)


@cache.command("list")
@_command
def list_(session: _Session) -> None:
    """List the tenant's segments, the newest first."""
    segments = sorted(session.cache.list(), key=lambda s: s.created, reverse=True)
    if session.as_json:
        print_json(to_builtins(segments))
    else:
        console().print(_table(segments))


@cache.command("show")
@click.argument("segment_id")
@click.option("--content", is_flag=True, help="Also print the segment's text and tokens.")
@_command
def show(session: _Session, segment_id: str, content: bool) -> None:
    """Print one segment."""
    _show(session, session.cache.get(segment_id, content=content))


@cache.command("pin")
@click.argument("segment_id")
@_command
def pin(session: _Session, segment_id: str) -> None:
    """Keep a segment's record in the pool."""
    _show(session, session.cache.pin(segment_id))


@cache.command("unpin")
@click.argument("segment_id")
@_command
def unpin(session: _Session, segment_id: str) -> None:
    """Let a segment's record be evicted."""
    _show(session, session.cache.unpin(segment_id))


@cache.command("ttl")
@click.argument("segment_id")
@click.argument("seconds")
@_command
def ttl(session: _Session, segment_id: str, seconds: str) -> None:
    """Let a segment expire SECONDS from now, or "never"."""
    try:
        ttl_s = None if seconds == "never" else float(seconds)
    except ValueError:
        raise click.BadParameter(f"{seconds!r}: expected a number of seconds, or never") from None
    _show(session, session.cache.set_ttl(segment_id, ttl_s))


@cache.command("delete")
@click.argument("segment_ids", nargs=-1, required=True)
@_command
def delete(session: _Session, segment_ids: tuple[str, ...]) -> None:
    """Delete segments and their records."""
    deleted = [session.cache.delete(segment_id) for segment_id in segment_ids]
    if session.as_json:
        print_json(to_builtins(deleted))
    else:
        for segment in deleted:
            click.echo(f"deleted {segment.id}")


@cache.command("stats")
@_command
def stats(session: _Session) -> None:
    """Print statistics of the pool and of each tier, over all tenants."""
    found = session.cache.stats()
    if session.as_json:
        print_json(to_builtins(found))
    else:
        console().print(_stats_table(found))
        click.echo(f"{found.segments} compiled segments; registry in {found.registry}")


def console() -> Console:
    """Return a console of the terminal's width; without a terminal a wide one, so that lines stay whole."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _show(session: _Session, segment: Segment) -> None:
    if session.as_json:
        print_json(to_builtins(segment))
        return
    table = Table(show_header=False, box=None)
    for name, value in to_builtins(segment).items():
        if value is not None or name in ("expires", "key"):
            table.add_row(name, Text(_cell(name, value)))
    table.add_row("in prompts", Text(segment.form))
    console().print(table)


def _table(segments: Iterable[Segment]) -> Table:
    names = ("id", "role", "tokens", "bytes", "last_used", "expires")
    table = Table()
    for name in names:
        justify: Literal["left", "right"] = "right" if name in ("tokens", "bytes") else "left"
        table.add_column(name.replace("_", " "), justify=justify, no_wrap=name == "id")
    table.add_column("state")
    for segment in segments:
        state = [name for name in ("pinned", "resident", "stored") if getattr(segment, name)]
        table.add_row(*(_cell(name, getattr(segment, name)) for name in names), " ".join(state))
    return table


def _stats_table(found: CacheStats) -> Table:
    """Return a table with a column for each tier and a row for each number; missing numbers stay blank."""
    table = Table()
    table.add_column("")
    for tier in found.tiers:
        table.add_column(tier, justify="right")
    for name in dict.fromkeys(name for numbers in found.tiers.values() for name in numbers):
        cells = (numbers.get(name) for numbers in found.tiers.values())
        table.add_row(name.replace("_", " "), *("" if n is None else _number(n) for n in cells))
    return table


def _number(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.6g}"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("created", "last_used", "expires"):
        return "never" if value is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _json(option: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise click.BadParameter(f"{text!r} is not JSON ({e})", param_hint=option) from e
    if not isinstance(value, kind):
        raise click.BadParameter(f"{text!r}: expected a JSON {kind.__name__}", param_hint=option)
    return value


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
