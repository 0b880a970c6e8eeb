"""Identity of a model's weights: records on disk outlive the process, and a path may get new weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")
"""Weights, and the configuration that says how they are read."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(vllm_config: VllmConfig) -> str:
    """The commit of a model from a hub, samples of a local model's files, or the seed of random weights.

    The same on every machine that has the same files, so that machines can share records.
    """
    load, model = vllm_config.load_config, vllm_config.model_config
    known = [str(load.load_format)]
    if load.load_format == "dummy":
        return _digest([*known, str(model.seed)])
    folder = _folder(model.model, model.revision)
    if folder is None:
        return _digest([*known, model.model, str(model.revision)])
    if folder.parent.name == "snapshots":
        return _digest([*known, folder.name])
    for path in sorted({p for pattern in _FILES for p in folder.glob(pattern) if p.is_file()}):
        known += [path.name, sample_of(path)]
    return _digest(known)


def sample_of(path: Path) -> str:
    """Digest of a file's size and of blocks spread evenly over it, first and last included.

    Reading all of 100 GB would take minutes at every start; training changes weights everywhere.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path | None:
    """Where the model's files are, if they are on this machine."""
    if (path := Path(model)).exists():
        return path if path.is_dir() else path.parent
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no hub name: from a store that only vLLM's loader knows
        return None
    return Path(found).parent if isinstance(found, str) else None


def _digest(known: list[str]) -> str:
    return hashlib.sha256("\n".join(known).encode()).hexdigest()
