"""Identifies the weights that made a record: the model's last change, and the files of an adapter (LoRA).

A call of workers that may change the model's weights ends a generation of records.  A digest of an adapter's
files names the adapter's records.

vLLM knows an adapter by an id.  Workers read the files at the id's first use, and when a call or a request
says ``load_inplace``.  Workers also reread the files, unannounced, after other adapters displaced the id.
A digest therefore holds only while the files stay untouched.  The scheduler's thread, the only user of this
module, checks the files when a request arrives and when a request ends.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = init_logger("vllm.hypic.adapters")

_FILES = ("adapter_config.json", *(f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt")))
"""Files of an adapter that vLLM reads."""
_HARMLESS = frozenset(
    (
        *("annotate_profile", "profile", "check_health", "synchronize_device", "wait_for_comm"),
        *("checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums"),
        *("save_sharded_state", "save_tensorized_model", "list_loras", "hypic_calls"),
        *("reset_encoder_cache", "reset_mm_cache", "release_late_interaction_query_cache"),
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
        *("execute_dummy_batch", "take_draft_token_ids", "update_max_model_len", "vocab_size"),
    )
)
"""Methods of vLLM's workers and of the plugin's workers that change no weights."""

_Stats = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change (ns) of each existing file."""


@dataclass(frozen=True)
class _Known:
    """Knowledge about an adapter id.  ``digest``: digest of the workers' weights; ``None`` if unknown."""

    path: str
    folder: Path | None
    stats: _Stats
    digest: str | None


class Adapters:
    """The adapters of one engine.

    ``requests()`` returns the requests that wait or run now.  ``reset(generation)`` begins a new generation
    of records, because requests under way may otherwise leave records of mixed weights.
    """

    def __init__(self, requests: Callable[[], Iterable[Request]], reset: Callable[[str], None]) -> None:
        self._requests, self._reset = requests, reset
        self._known: dict[int, _Known] = {}
        self._last: dict[str, str | None] = {}
        """The last digest of each path."""
        self._epoch = ""
        """A random text, renewed whenever the weights of an adapter change."""

    def name(self, lora: LoRARequest) -> str:
        """Return the weights' name for a request's records; a unique name if the weights are unknown."""
        return self._look(lora) or secrets.token_hex(16)

    def salt(self, lora: LoRARequest) -> str:
        """Return a salt that keeps blocks of former weights apart in vLLM's prefix cache.

        vLLM's prefix cache knows adapters by name and path only.  The salt is empty while no weights have
        changed.  Call this method after :meth:`name`.
        """
        known = self._known.get(lora.lora_int_id)
        return self._epoch if known is None or known.digest else secrets.token_hex(16)

    def ended(self, lora: LoRARequest) -> None:
        """Check the files as a request ends: workers may have read files changed since its arrival."""
        self._look(lora)

    def load(self, lora: LoRARequest, load: Callable[[], bool]) -> bool:
        """Let workers load the adapter by ``load()``; return or raise what ``load()`` returns or raises."""
        is_new = lora.lora_int_id not in self._known
        self._look(lora, told=True)  # before the workers read, so that a later change of files is noticed
        try:
            return load()
        except BaseException:
            if is_new:
                del self._known[lora.lora_int_id]
            else:
                unknown = replace(self._known[lora.lora_int_id], digest=None)
                self._know(lora, unknown, "could not be loaded")
            raise

    def forget(self, lora_id: int | None = None) -> None:
        """Forget an adapter that workers dropped; ``None`` forgets all, after any other change by workers."""
        if lora_id is None:
            self._known.clear()
        else:
            self._known.pop(lora_id, None)

    def _look(self, lora: LoRARequest, told: bool = False) -> str | None:
        """Return the digest of the weights that the adapter's requests use from now on; ``None`` if unknown.

        ``told``: whether workers are about to load the adapter.
        """
        known = self._known.get(lora.lora_int_id)
        is_same = known is not None and known.path == lora.lora_path
        folder = known.folder if known is not None and is_same else _folder(lora.lora_path)
        stats = _stats(folder)
        rereads = lora.load_inplace and (told or known is None or known.digest is None)
        # Workers cannot load deleted files, so the known weights stay in use.
        if known is not None and is_same and not rereads and stats in ((), known.stats):
            return known.digest
        if known is None or lora.load_inplace:
            digest = _digest(folder, stats, lora.is_3d_lora_weight)
            why = "" if digest else "cannot be read"
        else:
            digest, why = None, "changed, but are not loaded"
        self._know(lora, _Known(lora.lora_path, folder, stats, digest), why)
        return digest

    def _know(self, lora: LoRARequest, found: _Known, why: str) -> None:
        """Store ``found``, and reset records if weights changed while requests of the adapter are under way.
        ``why``: why the files do not tell which weights the workers have; empty if the files tell."""
        if why:
            logger.warning_once(
                "hypic: requests of adapter %s share no records, because the files of %s %s: load the "
                "adapter again, with load_inplace or under another id",
                *(lora.lora_name, lora.lora_path, why),
            )
        known, digest = self._known.get(lora.lora_int_id, found), found.digest
        is_other = known.digest != digest or self._last.get(lora.lora_path, digest) != digest
        self._known[lora.lora_int_id] = found
        self._last[lora.lora_path] = digest
        if not is_other:
            return
        self._epoch = secrets.token_hex(16)
        here = (request.lora_request for request in self._requests())
        if any(o and (o.lora_int_id == lora.lora_int_id or o.lora_path == lora.lora_path) for o in here):
            logger.info(
                "hypic: the weights of adapter %s changed during its requests: the engine drops all records",
                lora.lora_name,
            )
            self._reset(secrets.token_hex(16))


def _folder(path: str) -> Path | None:
    """Return vLLM's folder of the adapter, after a download if it is a hub's; ``None`` if not found."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        return Path(get_adapter_absolute_path(path))
    except (OSError, ValueError):  # the workers report the error
        return None


def _stats(folder: Path | None) -> _Stats:
    found = []
    for path in () if folder is None else (folder / name for name in _FILES):
        try:
            at = path.stat()
        except OSError:
            continue
        found.append((path.name, at.st_ino, at.st_size, at.st_ctime_ns))
    return tuple(found)


def _digest(folder: Path | None, stats: _Stats, is_3d: bool) -> str | None:
    """Return a digest of the adapter's files; ``None`` if the files are unreadable or change meanwhile.
    The digest covers whole files, because tuning may change a single layer."""
    if folder is None or not stats:
        return None
    digest = hashlib.sha256(str(is_3d).encode())
    try:
        for name, *_ in stats:
            with (folder / name).open("rb") as file:
                digest.update(name.encode() + hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return None
    return digest.hexdigest() if _stats(folder) == stats else None


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Return whether a call of ``method`` on workers may change weights.
    The answer is true for every call not known as harmless, a user's own functions and methods included."""
    return not isinstance(method, str) or not (method in _HARMLESS or method.startswith("get_"))
