"""Plans of prompts without segments, whose prefix is one leading record with checkpoints.

Exact: nothing is left out of what a token sees.  A prompt that begins like an earlier one goes on from the
last checkpoint that both share, wherever pages end; vLLM's own prefix cache has the states of linear layers
at the ends of its blocks alone, which are many times longer.
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
    """The plan of a prompt whose whole pages are a record; ``None``: they are fewer than ``least_tokens``, or
    too many for the pool.  Changes nothing; depends on its arguments alone; see
    :func:`~.plan.build_plan` for ``kept``, ``most`` and ``reads_successors``."""
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
    prompt = ParsedPrompt((Piece(whole, range(len(whole)), len(whole)),), len(whole), has_primitives=False)
    return assemble(prompt, {0: segment}, {}, (), method)


def behind(plan: PromptPlan, checkpoint: Checkpoint | None) -> PromptPlan:
    """``plan``, which is of a prefix, with what stands behind ``checkpoint`` computed by the request itself;
    ``None``: all of it."""
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
    """A prefix and the tokens behind it, whole pages of them; the prefix is one of its checkpoints."""
    ends = checkpoints(segment.key, range(page_tokens, len(behind) + 1, page_tokens), behind)
    *more, end = (replace(end, stop=segment.stop + end.stop) for end in ends)
    before = (*segment.checkpoints, Checkpoint(segment.stop, segment.key), *more)
    return replace(segment, key=end.key, tokens=(*segment.tokens, *behind), parts=(), checkpoints=before)
