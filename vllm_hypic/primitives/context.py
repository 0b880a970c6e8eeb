"""Contexts behind which records may be computed: a fixed text, or trained K and V (a learned context).

Files of ``vllm-hypic tune`` hold learned contexts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

_SOME_DAY = datetime(2025, 1, 1)
"""The day for templates that write today's date: records behind a context must serve on other days, too."""
_DEFAULT = "context.txt"
"""Name of the plugin's context file, which lies beside this module."""


def context_text(path: str | None) -> str:
    """Return the text in the file at ``path``, or the plugin's own text for ``None``.

    Raises ``ValueError`` for a file that is empty or cannot be read.
    """
    if path is None:
        return resources.files(__package__).joinpath(_DEFAULT).read_text(encoding="utf-8").strip()
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"context_file={path!r}: {e}") from e
    if not text:
        raise ValueError(f"context_file={path!r}: expected a text, but the file is empty")
    return text


def context_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the token ids of ``text`` where a prompt's documents stand.

    That place is the beginning of the first user turn, without the turn's end.  Without a chat template that
    renders such a turn, it is the beginning of the prompt.  The tokens do not depend on the day."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        options = {"tokenize": False, "add_generation_prompt": False, "strftime_now": _SOME_DAY.strftime}
        try:
            rendered: str = tokenizer.apply_chat_template(messages, **options)
        except Exception as e:  # templates raise what they like
            logger.warning("the chat template renders no message of a user alone: %s", e)
            rendered = ""
        before, found, _ = rendered.partition(text)
        if found:
            return tuple(tokenizer.encode(before + text, add_special_tokens=False))
    return tuple(tokenizer.encode(text))


SUFFIX = ".safetensors"
FORMAT = "1"
NONE_HERE = (
    "hypic_context='learned': this engine has no learned context; set its option "
    "context_file to a file that vllm-hypic tune wrote"
)


@dataclass(frozen=True)
class LearnedContext:
    """The description of a learned context's file, without its tensors.

    ``tokens``: tokens of the text from which training started; they take the context's positions, and only
    their number still matters.  ``model``: digest of the weights that the context was trained for
    (:func:`weights_digest`); ``digest``: digest of the file.
    """

    path: Path
    tokens: tuple[int, ...]
    model: str
    digest: str

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Load unrotated K, and V, ``[layers, tokens, kv_heads, size]`` each, layers in the model's order."""
        from safetensors.torch import load_file

        found = load_file(self.path)
        return found["key"], found["value"]


def read_learned(path: str | Path) -> LearnedContext:
    """Return a file's description.  Raises ``ValueError`` for a file not written by ``vllm-hypic tune``."""
    from safetensors import SafetensorError

    path = Path(path).absolute()
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as e:
        raise ValueError(f"context_file={str(path)!r}: expected a file of vllm-hypic tune: {e!r}") from e


@cache
def _read(path: Path, changed: int, size: int) -> LearnedContext:
    """Read the file as it was at time ``changed``.  Hashing is slow and options are built often: hence the
    cache."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = file.metadata() or {}
        key, value = (tuple(file.get_slice(name).get_shape()) for name in ("key", "value"))
    if told["format"] != FORMAT:
        raise ValueError(f"format {told['format']!r}: expected {FORMAT!r}")
    tokens = tuple(json.loads(told["tokens"]))
    if not tokens or len(key) != 4 or key != value or key[1] != len(tokens):
        raise ValueError(f"K {key} and V {value} do not match {len(tokens)} tokens")
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return LearnedContext(path, tokens, told["model"], digest)


def write_learned(
    path: Path,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: Sequence[int],
    model: str,
    told: dict[str, str],
) -> None:
    """Write a learned context to ``path``, and replace an older file in one step.

    ``key``, ``value``: as :meth:`LearnedContext.tensors` returns them; ``told``: facts about the training.
    """
    from safetensors.torch import save_file

    metadata = {"format": FORMAT, "tokens": json.dumps(list(tokens)), "model": model, **told}
    partial = path.with_name(path.name + ".partial")
    save_file({"key": key.contiguous(), "value": value.contiguous()}, partial, metadata)
    partial.replace(path)
