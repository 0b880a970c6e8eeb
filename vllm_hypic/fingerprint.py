"""Identifies a model's weights: records on disk outlive the process, and a path may get new weights."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")
"""Files of weights, and the configuration that says how vLLM reads the weights."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_COMMIT = re.compile(r"[0-9a-f]{40}")

logger = logging.getLogger("vllm.hypic.fingerprint")


def fingerprint(vllm_config: VllmConfig) -> str:
    """Return a digest of a hub model's commit, a local model's file samples, or random weights' seed.

    Machines with the same files get the same digest, so machines can share records.  Weights in object
    storage cannot be sampled; the revision stands for such weights.  Without a revision the engine's own id
    stands for such weights, so the records serve no other engine and no later start.
    """
    load, model = vllm_config.load_config, vllm_config.model_config
    known = [str(load.load_format)]
    if load.load_format == "dummy":
        return _digest([*known, str(model.seed)])
    if model.model_weights:
        known += [model.model_weights, model.revision or _engine_id(vllm_config)]
    # The model's own code changes records if vLLM runs that code.
    patterns = (*_FILES, "*.py") if model.trust_remote_code else _FILES
    return _digest([*known, *contents(model.model, model.revision, patterns, load.download_dir)])


def contents(model: str, revision: str | None, patterns: Sequence[str], hub: str | None = None) -> list[str]:
    """Return texts that identify the files of ``model``, a path or a name in a hub with cache folder ``hub``.

    The texts are the hub's commit, or names and samples of local files that match ``patterns``.  For files
    not on this machine, the texts are ``model`` and ``revision``.  ``hub=None`` means the default folder.
    """
    folder = _folder(model, revision, hub)
    if folder is None:
        return [model, str(revision)]
    if _is_snapshot(folder):
        return [folder.name]
    found: list[str] = []
    for path in sorted({p for pattern in patterns for p in folder.glob(pattern) if p.is_file()}):
        found += [path.name, sample_of(path)]
    return found


def weights_digest(model: str, revision: str | None = None, hub: str | None = None) -> str:
    """Return a digest of a model's weights and configuration; see :func:`contents`."""
    return _digest(contents(model, revision, ("*.safetensors", "*.bin", "config.json"), hub))


def _is_snapshot(folder: Path) -> bool:
    """Return whether ``folder`` is a commit in a hub's cache (``models--OWNER--NAME/snapshots/COMMIT``).
    Files of a commit never change."""
    snapshots = folder.parent
    named = _COMMIT.fullmatch(folder.name) is not None and snapshots.parent.name.startswith("models--")
    return named and snapshots.name == "snapshots"


def _engine_id(vllm_config: VllmConfig) -> str:
    logger.warning(
        "hypic cannot see whether the weights in object storage (%s) change, so only this engine uses its "
        "records. If the weights never change, name them with --revision NAME",
        vllm_config.model_config.model_weights,
    )
    transfer = vllm_config.kv_transfer_config
    return "" if transfer is None else str(transfer.engine_id)


def sample_of(path: Path) -> str:
    """Return a digest of a file's size and of blocks spread evenly over it, first and last block included.

    Reading all of 100 GB would take minutes at every start; training changes weights in all blocks.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(last * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _folder(model: str, revision: str | None, hub: str | None) -> Path | None:
    """Return the folder of the model's files, or ``None`` if this machine does not have the files."""
    if (path := Path(model)).exists():
        return path if path.is_dir() else path.parent
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=hub, revision=revision)
    except ValueError:  # the name is no hub name, but names a store that only vLLM's loader knows
        return None
    return Path(found).parent if isinstance(found, str) else None


def _digest(known: list[str]) -> str:
    return hashlib.sha256("\n".join(known).encode()).hexdigest()
