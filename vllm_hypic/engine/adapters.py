"""Which weights an adapter (LoRA) has: records of an adapter are named by what the adapter's files hold.

vLLM knows an adapter by an id.  Workers read the files when they first meet the id, and when a call or a
request says ``load_inplace``.  Workers also read the files again, without a word, when other adapters have
taken the id's place meanwhile.  So a digest of the files holds while the files are untouched, which is looked
at when a request comes and when a request ends.  The scheduler's thread only.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = init_logger("vllm.hypic.adapters")

_FILES = ("adapter_config.json", *(f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt")))
"""What vLLM reads."""

_Stats = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change of each file that is there."""


@dataclass(frozen=True)
class _Known:
    """What is known of an id.  ``digest``: that of the weights of the workers; ``None``: unknown."""

    path: str
    folder: Path | None
    stats: _Stats
    digest: str | None


class Adapters:
    """The adapters of one engine.

    ``requests()``: the requests that wait or run now.  ``reset(generation)`` begins a generation of records,
    where requests that are under way may leave records of two weights.
    """

    def __init__(self, requests: Callable[[], Iterable[Request]], reset: Callable[[str], None]) -> None:
        self._requests, self._reset = requests, reset
        self._known: dict[int, _Known] = {}
        self._last: dict[str, str | None] = {}
        """The last digest of each path."""
        self._epoch = ""
        """Another text whenever the weights of an adapter have changed."""

    def name(self, lora: LoRARequest) -> str:
        """What names the records of a request; nobody else has the name where the weights are unknown."""
        return self._look(lora) or secrets.token_hex(16)

    def salt(self, lora: LoRARequest) -> str:
        """What keeps blocks of former weights apart in vLLM's prefix cache, which knows names and paths only.

        Empty: nothing has changed.  To be asked after :meth:`name`.
        """
        known = self._known.get(lora.lora_int_id)
        return self._epoch if known is None or known.digest else secrets.token_hex(16)

    def ended(self, lora: LoRARequest) -> None:
        """A request ends.  Workers may have read files that were changed since the request came."""
        self._look(lora)

    def load(self, lora: LoRARequest, load: Callable[[], bool]) -> bool:
        """Have workers load the adapter; what ``load()`` returns or raises."""
        is_new = lora.lora_int_id not in self._known
        self._look(lora, told=True)  # before the workers: a later change of the files is noticed
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
        """Workers have dropped the adapter; ``None``: workers may have done anything with any adapter."""
        if lora_id is None:
            self._known.clear()
        else:
            self._known.pop(lora_id, None)

    def _look(self, lora: LoRARequest, told: bool = False) -> str | None:
        """Digest of the weights that requests of the adapter compute with from now on; ``None``: unknown.

        ``told``: workers are about to load the adapter.
        """
        known = self._known.get(lora.lora_int_id)
        is_same = known is not None and known.path == lora.lora_path
        folder = known.folder if known is not None and is_same else _folder(lora.lora_path)
        stats = _stats(folder)
        rereads = lora.load_inplace and (told or known is None or known.digest is None)
        # Files that are gone cannot be loaded.
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
        """``why``: the files do not say which weights the workers have; empty: they do."""
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
                "hypic: the weights of adapter %s changed during its requests: all records are forgotten",
                lora.lora_name,
            )
            self._reset(secrets.token_hex(16))


def _folder(path: str) -> Path | None:
    """Where vLLM finds the adapter; ``None``: nowhere.  Downloads what has a name in a hub, as vLLM does."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        return Path(get_adapter_absolute_path(path))
    except (OSError, ValueError):  # the workers say so
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
    """Digest of whole files, as tuning may change a single layer; ``None``: the files cannot be read, or are
    being written."""
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
