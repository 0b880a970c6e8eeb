"""Finds a model's configuration in its folder, in the hub's cache, or in the header of a GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ..harness.settings import model_folder


@contextmanager
def configuration_folder(model: str) -> Iterator[Path]:
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
