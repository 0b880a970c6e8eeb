"""``vllm-hypic check MODEL``: says whether the plugin serves a model, and which bytes segments take."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config.engine import HypicConfig
from ..errors import ConfigError
from ..harness.report import console, size, table
from ..harness.settings import HypicOptions, JsonObject, model_folder

if TYPE_CHECKING:
    from .findings import Findings

OURS = ("model", "attention_backend", "additional_config", "tensor_parallel_size", "data_parallel_size")
"""Arguments of vLLM that the command sets itself: it builds one rank."""
REFUSED, UNKNOWN = 1, 3
"""Exit codes for a model that the plugin refuses, and for a model that vLLM itself cannot build here."""


@click.command()
@click.argument("model")
@click.option(
    "--hypic", type=HypicOptions(), default="{}", show_default=True, help="Options of the plugin, as JSON."
)
@click.option(
    "--engine-args",
    type=JsonObject(OURS),
    default="{}",
    show_default=True,
    help='Arguments of vLLM, as JSON: {"dtype": "bfloat16"}.',
)
@click.option(
    "--pool-gib",
    type=click.FloatRange(0, min_open=True),
    default=4.0,
    show_default=True,
    help="Size of the pool in the answer; pool_bytes of --hypic takes precedence.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def check(
    context: click.Context,
    model: str,
    hypic: dict[str, Any],
    engine_args: dict[str, Any],
    pool_gib: float,
    as_json: bool,
) -> None:
    """Say which layers of MODEL this platform serves, and how many bytes a segment takes in each.

    MODEL is a folder, a name in the hub's cache, or a GGUF file. The command reads the configuration alone:
    it reads no weights and starts no engine. The engine checks rotary embeddings when it starts.

    Exit code: 0 served, 1 refused, 2 usage, 3 vLLM itself cannot build the model here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to the standard output
    try:
        config = HypicConfig.from_mapping({"pool_bytes": int(pool_gib * 2**30), **hypic})
    except ConfigError as e:
        raise click.UsageError(f"--hypic: {e}") from e
    from .findings import NotBuilt, find

    try:
        with _configuration_folder(model) as folder:
            found = find(folder, config, engine_args)
    except NotBuilt as e:
        click.echo(f"{model}: not checked: {e}", err=True)
        context.exit(UNKNOWN)
    click.echo(json.dumps(dataclasses.asdict(found), indent=2)) if as_json else _show(found)
    context.exit(0 if found.served else REFUSED)


@contextmanager
def _configuration_folder(model: str) -> Iterator[Path]:
    """Yield a folder with the ``config.json`` of ``model``.

    Raises ``click.UsageError`` if there is no configuration, or the file cannot be read.
    """
    file = Path(model)
    if not (file.suffix == ".gguf" and file.is_file()):
        yield model_folder(model)
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_gguf_configuration(file, Path(folder))
        yield model_folder(folder)


def _write_gguf_configuration(file: Path, folder: Path) -> None:
    """Write the configuration that transformers reads in a GGUF file's header as vLLM's ``config.json``."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as e:
        raise click.UsageError(f"{file}: the package gguf reads GGUF files: pip install gguf") from e
    except Exception as e:  # a broken file raises errors of numpy, struct or transformers
        raise click.UsageError(f"{file}: transformers cannot read the header: {e}") from e
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if architecture is None:
        raise click.UsageError(f"{file}: transformers has no causal model of the type {config.model_type!r}")
    config.architectures = [architecture]
    config.save_pretrained(folder)


def _show(found: Findings) -> None:
    title = f"{found.architecture}, {found.dtype or '?'}, {found.platform}"
    rows = [
        (
            str(kind.layers),
            kind.what,
            "served" if kind.refusal is None else f"refused: {kind.refusal}",
            size(kind.segment_bytes) if kind.segment_bytes else "",
        )
        for kind in found.kinds
    ]
    columns = ("layers", "", "", f"a segment of {found.segment_tokens:,} tokens" if found.served else "bytes")
    if rows:
        console().print(table(title, columns, rows))
    if found.refusal is not None:
        click.echo(f"{title}: refused: {found.refusal}")
        return
    each = sum(kind.segment_bytes for kind in found.kinds)
    click.echo(
        f"Served. A segment of {found.segment_tokens:,} tokens takes {size(each)}; "
        f"a pool of {size(found.pool_bytes)} holds {found.segments:,} segments."
    )
    if windowed := [kind for kind in found.kinds if kind.before_window_bytes]:
        before = size(sum(kind.before_window_bytes for kind in windowed))
        layers = sum(kind.layers for kind in windowed)
        click.echo(
            f"{before} are rows before the last window of {layers} layers: islands, and segments "
            "with equal beginnings, may start anywhere and read these rows."
        )
