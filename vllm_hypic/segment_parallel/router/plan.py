"""The engine's plan of a prompt, made by the router from the instance's description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...primitives.keys import Namespace, Role, SegmentKey
from ...primitives.options import link_of_request, link_options
from ...primitives.pieces import PromptError, parse_prompt
from ...primitives.plan import CachedSegment, PromptPlan, build_plan
from ...primitives.policies import LinkError, LinkMethod
from ...primitives.tokens import PrimitiveIds
from ..description import Description

MOST_PADDING = 1 << 20
"""Limit on the padding tokens in all warm-up prompts of one request together."""


@dataclass(frozen=True)
class SegmentAsk:
    """One distinct record of a request.  ``prompt``: a warm-up prompt that makes exactly this record; empty
    where that prompt would be too long, or the record depends on the leading segment, so that no other
    instance can compute the record."""

    key: SegmentKey
    prompt: tuple[int, ...]
    tokens: int
    """Number of tokens that must be computed for the record."""


@dataclass(frozen=True)
class Planned:
    """The plan that the engine with ``description`` will make for a request."""

    plan: PromptPlan
    description: Description
    salt: str | None
    options: Mapping[str, Any]
    """``vllm_xargs`` of the request's segment requests: link method and seam, written out."""

    @cached_property
    def segments(self) -> tuple[SegmentAsk, ...]:
        """The plan's distinct records, in the order of the prompt."""
        asks: dict[SegmentKey, SegmentAsk] = {}
        padding, primitives = 0, self.description.primitives
        for segment in self.plan.segments:
            if segment.key in asks:
                continue
            # A segment's padding is as long as its start position: the sum grows with the prompt's square.
            padding += segment.start if self.plan.method.fixed_position else 0
            behind_lead = segment.context is not None and self.plan.method.context == "lead"
            makes = padding <= MOST_PADDING and not segment.anchor and not behind_lead
            prompt = warmup_prompt(segment, self.plan.method, primitives) if makes else ()
            asks[segment.key] = SegmentAsk(segment.key, tuple(prompt), segment.prepended + segment.stop)
        return tuple(asks.values())

    @property
    def stream_tokens(self) -> int:
        """Number of tokens that the combine node computes in any case."""
        return len(self.plan.stream)

    def made_by(self, worker: Description, ask: SegmentAsk) -> bool:
        """Whether ``worker``, whose pool may be smaller, computes exactly this record from the prompt."""
        if not ask.prompt or worker.primitives != self.description.primitives:
            return False
        if worker.ranks != self.description.ranks:
            return False  # the worker divides records into other parts
        try:
            found = _plan(ask.prompt, self.plan.method, worker, self.salt)
        except (LinkError, PromptError):
            return False
        return [s.key for s in found.segments] == [ask.key]


def plan_request(
    ids: Sequence[int], extra_args: Mapping[str, Any], salt: str | None, description: Description
) -> Planned | None:
    """Return the plan that the engine will make; ``None`` for a request that it refuses or need not plan.

    The function changes nothing, and its result depends on the arguments alone.
    """
    if not description.primitives.contains(ids):
        return None
    try:
        defaults = description.link_defaults
        method = link_of_request(extra_args, defaults)
        if method.refused_by(description.traits) is not None:
            return None
        plan = _plan(ids, method, description, salt)
    except (LinkError, PromptError):
        return None
    return Planned(plan, description, salt, link_options(extra_args, defaults))


def _plan(ids: Sequence[int], method: LinkMethod, description: Description, salt: str | None) -> PromptPlan:
    """Plan a prompt.  Raises ``LinkError`` when the description lacks the context that ``method`` needs."""
    if method.context in ("text", "learned") and (
        not description.context_tokens or method.context != description.context
    ):
        raise LinkError(f"hypic_context={method.context!r}: the instance does not describe this context")
    return build_plan(
        parse_prompt(ids, description.primitives),
        # Islands change tokens of the stream, but no record: only the combine node computes them.
        replace(method, islands=None),
        Namespace(description.namespace, description.generation).scoped(salt=salt, lora=None),
        description.limits,
        min_segment_tokens=description.min_segment_tokens,
        context=description.context_tokens,
        learned=description.learned,
        checkpoint_tokens=description.checkpoint_tokens,
        reads_successors=description.reads_successors,
    )


def warmup_prompt(segment: CachedSegment, method: LinkMethod, primitives: PrimitiveIds) -> list[int]:
    """Return token ids of a prompt whose only segment is ``segment``, at positions that give the same key."""
    ids = [primitives.sep] if segment.role is Role.INTERIOR else []
    if method.fixed_position:
        ids += [primitives.pad] * segment.start
    if segment.offsets is None:
        ids += segment.tokens
    else:
        position = 0
        for offset, token in zip(segment.offsets, segment.tokens, strict=True):
            ids += [primitives.pad] * (offset - position)
            ids.append(token)
            position = offset + 1
    return [*ids, primitives.sep]
