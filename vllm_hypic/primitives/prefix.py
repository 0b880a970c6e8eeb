"""Plans of prompts without segments, whose prefix is one leading record with checkpoints.

Such a plan is exact: each token sees all tokens before it.  A prompt with an earlier prompt's beginning
resumes at their last common checkpoint, at any end of a page.  vLLM's own prefix cache has states of linear
layers only at the ends of its blocks, which are many times longer than pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from .checkpoints import Checkpoint, checkpoints
from .keys import Namespace, Role, SegmentKey, segment_key
from .pieces import ParsedPrompt, Piece
from .plan import Budget, CachedSegment, Part, PoolLimits, PromptPlan, assemble
from .policies import LinkMethod


def build_prefix_plan(
    tokens: Sequence[int],
    method: LinkMethod,
    namespace: Namespace,
    limits: PoolLimits,
    *,
    least_tokens: int,
    kept: Collection[SegmentKey] = (),
    most: PoolLimits | None = None,
    reads_successors: bool = False,
) -> PromptPlan | None:
    """Return the plan of a prompt whose whole pages are one record.

    ``None``: these pages have fewer tokens than ``least_tokens``, or exceed the pool.  The function changes
    nothing, and depends on its arguments alone.  :func:`~.plan.build_plan` explains ``kept``, ``most`` and
    ``reads_successors``."""
    page = limits.page_tokens
    stop = (len(tokens) - 1) // page * page
    if stop < max(1, least_tokens):
        return None
    whole, own = tuple(tokens), tuple(tokens[:stop])
    begins = partial(segment_key, namespace, Role.LEADING, head=0, tail=0, checkpoint_tokens=page)
    *before, end = checkpoints(begins(()), range(page, stop + 1, page), whole, successors=reads_successors)
    segment = CachedSegment(
        end.key, Role.LEADING, own, None, 0, 0, 0, 0, (), checkpoints=tuple(before), is_prefix=True
    )
    if not Budget(limits, kept, most).take(segment):
        return None
    prompt = ParsedPrompt((Piece(whole, range(len(whole)), len(whole)),), len(whole))
    return assemble(prompt, {0: segment}, {}, (), method)


def behind(plan: PromptPlan, checkpoint: Checkpoint | None) -> PromptPlan:
    """Return ``plan``, the plan of a prefix, such that the request itself computes all tokens behind
    ``checkpoint``, or all tokens for ``None``."""
    [segment] = plan.segments
    first = 0 if checkpoint is None else checkpoint.stop
    read: tuple[CachedSegment, ...] = ()
    if checkpoint is not None:
        read = (
            replace(
                segment,
                key=checkpoint.key,
                tokens=segment.tokens[:first],
                parts=(Part(0, 0, first),),
                checkpoints=(),
            ),
        )
    stream = segment.tokens[first:] + plan.stream
    return replace(plan, segments=read, stream=stream, positions=tuple(range(first, plan.n_logical)))


def continued(segment: CachedSegment, behind: Sequence[int], page_tokens: int) -> CachedSegment:
    """Return the prefix ``segment`` extended by the whole pages of the tokens ``behind`` it.

    The old prefix becomes a checkpoint of the new one."""
    ends = checkpoints(segment.key, range(page_tokens, len(behind) + 1, page_tokens), behind)
    *more, end = (replace(end, stop=segment.stop + end.stop) for end in ends)
    before = (*segment.checkpoints, Checkpoint(segment.stop, segment.key), *more)
    return replace(segment, key=end.key, tokens=(*segment.tokens, *behind), parts=(), checkpoints=before)
