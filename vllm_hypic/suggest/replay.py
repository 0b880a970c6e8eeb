"""Replays prompts in sequence, and counts the tokens that engines with unlimited memory would reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from ..primitives.islands import QuestionFinder
from ..primitives.keys import Namespace, Role, SegmentKey
from ..primitives.pieces import ParsedPrompt
from ..primitives.plan import IslandChooser, PoolLimits, PromptPlan, build_plan
from ..primitives.policies import LinkMethod

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Linking:
    """Arguments of :func:`~vllm_hypic.primitives.plan.build_plan`, which plans prompts."""

    method: LinkMethod
    min_segment_tokens: int
    max_model_len: int
    context: tuple[int, ...] = ()
    choose_islands: IslandChooser | None = None
    find_question: QuestionFinder | None = None

    def plan(self, prompt: ParsedPrompt, salt: str | None) -> PromptPlan:
        return build_plan(
            prompt,
            self.method,
            Namespace("").scoped(salt=salt, lora=None),
            PoolLimits(_UNLIMITED, _UNLIMITED, 1, self.max_model_len - 1, _UNLIMITED),
            min_segment_tokens=self.min_segment_tokens,
            context=self.context,
            choose_islands=self.choose_islands,
            find_question=self.find_question,
        )


class PrefixCaches:
    """vLLM's prefix caches of several engines, without eviction: the engines that have each block."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._engines: dict[int, int] = {}
        """Engines that have a block, by the block's hash, with a bit for each engine."""
        self._count = 0

    def add(self) -> int:
        """Add an engine, and return its bit."""
        self._count += 1
        return 1 << self._count

    def cached(self, engine: int, tokens: Sequence[int], salt: str | None) -> int:
        """Return how many of the first ``tokens`` the engine has cached, and cache all whole blocks."""
        size, found, last = self._block_tokens, 0, len(tokens) - 1  # the last token is always computed
        block = hash(salt)
        for stop in range(size, len(tokens) + 1, size):
            block = hash((block, *tokens[stop - size : stop]))
            engines = self._engines.get(block, 0)
            if engines & engine and found == stop - size and stop <= last:
                found = stop
            self._engines[block] = engines | engine
        return found


@dataclass
class Replay:
    """Replay of prompts on an engine, with its counts of reused tokens so far."""

    linking: Linking
    caches: PrefixCaches
    tokens: int = 0
    """Tokens of all prompts."""
    reused: int = 0
    """Prompt tokens read from records or from vLLM's prefix cache, as in ``cached_tokens``."""
    segment_tokens: int = 0
    """Prompt tokens in segments, without leading segments."""
    record_tokens: int = 0
    """Tokens whose K and V all records together hold."""
    pieces: list[int] = field(default_factory=list)
    """Number of segments in each prompt, without leading segments."""

    def __post_init__(self) -> None:
        self._engine = self.caches.add()
        self._records: set[SegmentKey] = set()

    def answer(self, ids: Sequence[int], prompt: ParsedPrompt | None, salt: str | None) -> int:
        """Replay a tenant's prompt, and return the number of its reused tokens.  ``prompt``: the cut prompt;
        ``None`` for an uncut prompt with the tokens ``ids``."""
        cached = partial(self.caches.cached, self._engine)
        if prompt is None:
            self.pieces.append(0)
            self.tokens += len(ids)
            reused = cached(ids, salt)
            self.reused += reused
            return reused
        plan = self.linking.plan(prompt, salt)
        # A prompt may hold a segment twice; its own computation of that segment does not count as reuse.
        reused = sum(s.reused for s in plan.segments if s.key in self._records)
        if not plan.warm_only:
            reused += cached(plan.stream, salt if plan.salt is None else f"{plan.salt}:{salt}")
        for record in plan.records:
            if record.key not in self._records:
                self._records.add(record.key)
                self.record_tokens += record.columns
        interior = [s for s in plan.segments if s.role is Role.INTERIOR]
        self.pieces.append(len(interior))
        self.segment_tokens += sum(len(s.tokens) for s in interior)
        self.tokens += plan.n_logical
        self.reused += reused
        return reused

    @property
    def reuse(self) -> float:
        """Return the share of the prompts' tokens that was reused."""
        return self.reused / self.tokens if self.tokens else 0.0

    @property
    def share_in_segments(self) -> float:
        return self.segment_tokens / self.tokens if self.tokens else 0.0

    @property
    def median_pieces(self) -> float:
        return median(self.pieces or [0])
