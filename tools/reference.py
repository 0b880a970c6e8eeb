"""Write the pages of docs/reference that the code knows best: options, metrics, commands and routes.

    .venv/bin/python tools/reference.py --write docs/reference
    .venv/bin/python tools/reference.py --check docs/reference     # exit code 1: a page is another one now

Sentences stand in the code, beside what they describe; the tool ends with the name of what has none. It needs
neither vLLM nor torch.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from reference_routes import routes_page
from reference_text import said, table

from vllm_hypic.cli import main as cli
from vllm_hypic.config.engine import GateConfig, HypicConfig, SegmentingConfig
from vllm_hypic.config.schema import Allowed, Form, plain
from vllm_hypic.config.segment_parallel import SegmentParallelConfig
from vllm_hypic.config.store import TIERS, StoreConfig, TierConfig
from vllm_hypic.connector import metrics as of_engine
from vllm_hypic.primitives.tokens import PrimitiveIds, PrimitiveTexts
from vllm_hypic.segment_parallel.router.metrics import RouterMetrics

OPTIONS = """\
# Options of the engine

Set these options with `--additional-config '{"hypic": {"seam_tokens": 4}}'`, in Python `additional_config=`.
The same options in the `kv_connector_extra_config` of `--kv-transfer-config` win over them.
The engine refuses to start with a wrong value, and names the option, the value and the allowed values.
"""
METRICS = """\
# Metrics

An engine's metrics stand on the server's `/metrics` and have vLLM's labels `model_name` and `engine`, too.
The router's metrics stand on the router's `/metrics`. [Watch a server](../how-to/watch.md) says which metrics
matter.
"""
OF_VLLM = """
## vLLM's own metrics

vLLM's counters and its log line agree with `usage` of the answers and leave internal segment requests out.
KV events (`--kv-events-config`) report blocks of plain prompts alone; with `prefix` `sparse`, prompts whose
prefixes are records are not plain.

| metric | counts |
| --- | --- |
| `vllm:prefix_cache_hits_total` | Tokens from vLLM's own cache. |
| `vllm:external_prefix_cache_hits_total` | Tokens from records. |
| `vllm:external_prefix_cache_queries_total` | Tokens of prompts that ask for records, without the hits of \
vLLM's own cache; plain prompts only where another KV connector stands beside. |
| `vllm:prompt_tokens_cached_by_source_total` | Reused tokens by place: `device` is the pool \
and vLLM's own cache, `host` a tier `memory` or the write queue, `disk` a tier `disk`, `p2p` another server, \
`external_unspecified` any other tier. |
"""
COMMANDS = """\
# Commands

The package installs the command `vllm-hypic`. `vllm-hypic COMMAND --help` prints the same as this page.
"""
SEE = {
    "store": "[Share a cache](../how-to/share-a-cache.md) says which tier to take.",
    "segment": "[Without separators](../how-to/without-separators.md) describes modes and patterns.",
    "segment_parallel": "[Several servers](../how-to/several-servers.md) shows a set-up.",
    "gate": "[Choose for my model](../how-to/choose-for-my-model.md) describes sign-offs.",
    "token_texts": "A text that is in the vocabulary keeps its id. "
    "[Requests](request.md#text-of-other-authors) describes `literal`.",
}
SECTIONS = {
    "store": StoreConfig,
    "segment": SegmentingConfig,
    "segment_parallel": SegmentParallelConfig,
    "gate": GateConfig,
    "token_texts": PrimitiveTexts,
    "token_ids": PrimitiveIds,
}
ENGINE_METRICS = (
    ("Requests, segments and the pool", "", "", of_engine.COUNTERS, of_engine.GAUGES, {}),
    ("Ways of finding segments", "mode_", "mode", of_engine.MODE_COUNTERS, {}, {}),
    ("The store", "store_", "", of_engine.STORE_COUNTERS, of_engine.STORE_GAUGES, {}),
    ("Tiers", "tier_", "tier", of_engine.TIER_COUNTERS, of_engine.TIER_GAUGES, of_engine.TIER_HISTOGRAMS),
)
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "list", type(None): "null"}


# -- options


def options_page() -> str:
    text = f"{OPTIONS}\n{options_table(HypicConfig)}"
    for name, section in SECTIONS.items():
        text += f"\n## `{name}`\n\n" + (f"{SEE[name]}\n\n" if name in SEE else "") + options_table(section)
        if section is StoreConfig:
            text += _tiers()
    return text


def _tiers() -> str:
    kind = ("`type`", "string", "required", f"one of {_values(tuple(TIERS))}", "Kind of the tier.")
    text = "\n### Every tier\n\n" + options_table(TierConfig, kind)
    for name, configs in TIERS.items():
        for config, form in zip(configs, ("embedded", "server") if len(configs) > 1 else ("",), strict=True):
            text += f"\n### Tier `{name}`{form and f', {form}'}\n\n{options_table(config)}"
    return text


def options_table(section: type, *first: Sequence[str]) -> str:
    """A row for each field of ``section`` itself.  :class:`MissingSentence` names one that has none."""
    sentences, hints = dict(_sentences(section)), get_type_hints(section, include_extras=True)
    rows = [
        (
            f"`{f.name}`",
            _type(hints[f.name]),
            _default(f),
            _allowed(hints[f.name]),
            said(f"{section.__name__}.{f.name}", sentences.get(f.name)),
        )
        for f in dataclasses.fields(section)
        if f.name in section.__annotations__
    ]
    return table(("option", "type", "default", "allowed", "meaning"), [*first, *rows])


def _sentences(section: type) -> Iterator[tuple[str, str]]:
    """Fields and the strings below them."""
    [made] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body = made.body if isinstance(made, ast.ClassDef) else []
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant):
                yield field.target.id, str(text.value)


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _type(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        kinds = dict.fromkeys(_type(one) for one in get_args(hint))
        return " or ".join(kind for kind in kinds if not (kind == "integer" and "number" in kinds))
    if get_origin(hint) is Literal:
        return "string"
    return NAMES.get(get_origin(hint) or hint, "object")


def _allowed(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        texts = [note.text for note in notes if isinstance(note, Allowed | Form)]
        text = (texts[-1] if texts else "") or _allowed(kind)
        return re.sub(r"(?<=one of )\S.*", lambda found: _values(found[0].split(", ")), text)
    if get_origin(hint) in (Union, types.UnionType):
        texts = [text for one in get_args(hint) if (text := _allowed(one))]
        return ", or ".join(text for text in texts if text != "null" or "or null" not in texts[0])
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    named = {type(None): "null", bool: "true or false", str: "a non-empty string", int: "an integer >= 0"}
    return "an object" if dataclasses.is_dataclass(hint) else named.get(hint, "")


def _values(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is field.default_factory is dataclasses.MISSING:
        return "required"
    if isinstance(field.default_factory, type):
        return f"see [`{field.name}`](#{field.name})"
    return f"`{json.dumps(plain(field.default))}`" if field.default != "" else "the type"


# -- metrics


def metrics_page() -> str:
    text = METRICS
    columns = ("metric", "type", "labels", "meaning")
    for title, prefix, label, counters, gauges, histograms in ENGINE_METRICS:
        rows = []
        for kind, texts in (("counter", counters), ("gauge", gauges), ("histogram", histograms)):
            for name, sentence in texts.items():
                full = f"vllm:hypic_{prefix}{name}" + ("_total" if kind == "counter" else "")
                rows.append((f"`{full}`", kind, f"`{label}`" if label else "", said(full, sentence)))
        text += f"\n## {title}\n\n"
        if label == "mode":
            text += f"`mode` is one of {_values(of_engine.MODES)}.\n\n"
        text += table(columns, rows)
    registry = RouterMetrics([]).registry
    rows = []
    for found in registry.collect():
        full = found.name + ("_total" if found.type == "counter" else "")
        labels = getattr(registry._names_to_collectors.get(found.name), "_labelnames", ("instance",))
        rows.append(
            (f"`{full}`", found.type, ", ".join(f"`{n}`" for n in labels), said(full, found.documentation))
        )
    return f"{text}\n## The router\n\n{table(columns, rows)}{OF_VLLM}"


# -- commands


def commands_page() -> str:
    return COMMANDS + "".join(_commands(cli, click.Context(cli, info_name="vllm-hypic")))


def _commands(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    sentences = _marked(inspect.cleandoc(command.help or ""))
    said(context.command_path, sentences.split("\n\n")[0])
    yield f"\n## `{context.command_path}`\n\n    {usage}\n\n{sentences}\n"
    rows = [_option(p, context) for p in command.params if isinstance(p, click.Option)]
    if rows:
        yield "\n" + table(("option", "default, range", "meaning"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, click.Context(inner, info_name=name, parent=context))


def _option(param: click.Option, context: click.Context) -> tuple[str, str, str]:
    record = param.get_help_record(context)
    assert record is not None, "no option is hidden"
    names, told = record
    sentence, _, values = told.partition("  [")
    values = values.removesuffix("]").replace("]  [", "; ")
    meaning = said(f"{context.command_path} {names}", _marked(sentence))
    return f"`{names}`", _marked(values.replace("default: ", "")), meaning


def _marked(text: str) -> str:
    """With options, JSON and variables marked as code."""
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]*|\{.*?\}|[A-Z_]*=[\w,]+)", r"`\1`", text)


PAGES = {
    "options.md": options_page,
    "metrics.md": metrics_page,
    "commands.md": commands_page,
    "routes.md": routes_page,
}


@click.command()
@click.option("--write", type=click.Path(file_okay=False, path_type=Path), help="Folder for the pages.")
@click.option("--check", type=click.Path(file_okay=False, path_type=Path), help="Folder to compare.")
def main(write: Path | None, check: Path | None) -> None:
    for name, page in PAGES.items():
        text = page()
        if write is not None:
            write.mkdir(parents=True, exist_ok=True)
            (write / name).write_text(text, "utf-8")
        if check is not None and (check / name).read_text("utf-8") != text:
            raise click.ClickException(f"{check / name}: run tools/reference.py --write {check}")


if __name__ == "__main__":
    main()
