"""Identity of a cached segment: the hash covers everything that changes the record's bytes."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from .media import Media, described
from .pieces import PromptError

FORMAT_VERSION = 1
"""Version of the record's content; part of every key."""

SegmentKey = NewType("SegmentKey", str)
"""Hex digest that names one record."""


class Role(Enum):
    """A segment's place in a prompt: the same tokens as leading and as interior segment are two records."""

    LEADING = "leading"
    INTERIOR = "interior"


@dataclass(frozen=True)
class Namespace:
    """The properties that all keys of an engine share.

    ``digest`` hashes model id and revision, dtypes, layer kinds and rotary parameters.  LoRA and
    tenant salt differ by request: :meth:`scoped` adds them.
    """

    digest: str
    generation: str = ""
    """Name of the weights: empty for the weights at the engine's start, and a new name after each possible
    change of them."""

    @staticmethod
    def from_config(config: Mapping[str, object]) -> Namespace:
        text = json.dumps({"format": FORMAT_VERSION, **config}, sort_keys=True, default=str)
        return Namespace(hashlib.sha256(text.encode()).hexdigest())

    def scoped(self, *, salt: str | None, lora: str | None) -> Namespace:
        """Return the namespace of a tenant and an adapter; without both, the engine's own."""
        if salt is None and lora is None:
            return self
        text = json.dumps([self.digest, salt, lora])
        return Namespace(hashlib.sha256(text.encode()).hexdigest(), self.generation)

    def renamed(self, key: SegmentKey) -> SegmentKey:
        """Translate a record's key between the first generation and this generation, in both directions.

        The function is its own inverse, so a pin or an id finds its record by the first key in every one.
        """
        if not self.generation:
            return key
        mask = hashlib.sha256(f"generation {self.generation}".encode()).digest()
        return SegmentKey(bytes(a ^ b for a, b in zip(bytes.fromhex(key), mask, strict=True)).hex())


def segment_key(
    namespace: Namespace,
    role: Role,
    tokens: Sequence[int],
    *,
    head: int,
    tail: int,
    dummies: int = 0,
    anchor: Sequence[int] = (),
    offsets: Sequence[int] | None = None,
    fixed_start: int | None = None,
    context: SegmentKey | None = None,
    learned: str = "",
    media: Media = (),
    checkpoint_tokens: int = 0,
) -> SegmentKey:
    """Return a record's key: hash(namespace, role, seam window, tokens before it, positions, token ids),
    renamed for the generation.

    ``context``: key of the record behind which this record is computed; ``learned``: digest of the file that
    holds its K and V, if the engine does not compute them; ``media``: its images, by indices of ``tokens``;
    ``checkpoint_tokens``: length of the stretches in which the record is computed, 0: computed as a whole.
    Raises :class:`PromptError` for a token id of more than 63 bits.
    """
    shape = json.dumps([namespace.digest, role.value, head, tail, dummies, fixed_start])
    digest = hashlib.sha256(shape.encode())
    digest.update(packed(tokens))
    if anchor:
        digest.update(b"anchor")
        digest.update(packed(anchor))
    if context is not None:
        digest.update(b"context")
        digest.update(bytes.fromhex(namespace.renamed(context)))
    if learned:
        digest.update(b"learned")
        digest.update(learned.encode())
    if offsets is not None:
        digest.update(b"offsets")
        digest.update(array("q", offsets).tobytes())
    if checkpoint_tokens:
        digest.update(b"checkpoints")
        digest.update(packed([checkpoint_tokens]))
    if media:
        digest.update(b"media")
        digest.update(json.dumps(described(media)).encode())
    return namespace.renamed(SegmentKey(digest.hexdigest()))


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes.  Raises :class:`PromptError` for an id of more than 63 bits."""
    try:
        return array("q", tokens).tobytes()
    except OverflowError as e:
        raise PromptError(f"token id {max(tokens, key=abs)}: expected at most {(1 << 63) - 1}") from e
