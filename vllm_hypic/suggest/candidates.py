"""Compares ways of finding segments, and recommends a way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.engine import SegmentingConfig
from ..engine.renderer import CHAT
from ..engine.segments import PromptSegments, Vocabulary
from ..primitives.pieces import ParsedPrompt, cut_prompt, parse_prompt
from ..primitives.places import PRESETS
from ..primitives.tokens import PrimitiveIds
from .prompts import RecordedPrompt
from .replay import Linking, PrefixCaches, Replay

MEANS = (512, 1024, 2048)
"""Mean lengths of the pieces of mode ``cdc``, in tokens."""
_PRESET = 4
"""Rank of single patterns; patterns that add no reuse are not shown."""
NEAR = 0.02
"""Share of the prompts' tokens by which a candidate may reuse less and still count as good as the best."""


@dataclass(frozen=True)
class Candidate:
    """Options of section ``segment``, with the replay that measures their reuse."""

    name: str
    rank: int
    """Complexity of the options: the smaller, the simpler."""
    options: dict[str, Any] | None
    """Options of section ``segment``; ``None`` for vLLM's prefix cache alone."""
    cut: Callable[[RecordedPrompt], ParsedPrompt | None]
    replay: Replay


class Comparison:
    """Replays prompts with every candidate.

    ``given``: options of section ``segment`` that all candidates start from; ``block_tokens``: tokens in a
    block of vLLM's prefix cache.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        primitives: PrimitiveIds,
        given: SegmentingConfig,
        linking: Linking,
        block_tokens: int,
    ) -> None:
        self._primitives = primitives
        caches = PrefixCaches(block_tokens)

        def candidate(name: str, rank: int, options: dict[str, Any]) -> Candidate:
            segments = PromptSegments(vocabulary, replace(given, **options))
            mode = options["mode"]

            def cut(prompt: RecordedPrompt) -> ParsedPrompt | None:
                spans = segments.found(prompt.ids, mode, prompt.engine_input).spans
                return cut_prompt(prompt.ids, spans) if spans else None

            return Candidate(name, rank, options, cut, Replay(linking, caches))

        self._stock = Candidate("prefix caching alone", 0, None, lambda _: None, Replay(linking, caches))
        self._off = Candidate("off", 1, {"mode": "off"}, lambda _: None, Replay(linking, caches))
        self._structure = candidate("structure", 2, {"mode": "structure"})
        self._others = [
            candidate("text", 3, {"mode": "text"}),
            *(candidate(f"text, {name}", _PRESET, {"mode": "text", "patterns": (name,)}) for name in PRESETS),
            *(candidate(f"cdc, {n}", 5, {"mode": "cdc", "mean_tokens": n}) for n in MEANS),
        ]
        self.all = [self._stock, self._off, self._structure, *self._others]
        self.prompts = self.with_separators = self.chats = 0
        self.tenants: set[str | None] = set()

    def add(self, prompt: RecordedPrompt) -> None:
        """Replay the prompt with every candidate."""
        primitives = self._primitives
        marked = parse_prompt(prompt.ids, primitives) if primitives.contains(prompt.ids) else None
        plain = [token for token in prompt.ids if primitives.marker(token) is None] if marked else prompt.ids
        self.prompts += 1
        self.tenants.add(prompt.salt)
        self.with_separators += marked is not None
        self.chats += CHAT in prompt.engine_input
        for candidate in self.all:
            cut = None
            if prompt.may_reuse and candidate is not self._stock:
                cut = marked or candidate.cut(prompt)
            candidate.replay.answer(plain, cut, prompt.salt)

    def candidates(self) -> list[Candidate]:
        """Return the candidates that these prompts distinguish, the most reuse first."""
        shown = [self._stock]
        if self.with_separators:
            shown.append(self._off)
        if self.chats:
            shown.append(self._structure)
        least = self._stock.replay.reuse
        shown += [c for c in self._others if c.rank != _PRESET or c.replay.reuse > least]
        return sorted(shown, key=lambda c: (-c.replay.reuse, c.rank))


def recommended(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of the candidates that are as good as the best."""
    best = max(c.replay.reuse for c in candidates)
    good = [c for c in candidates if c.replay.reuse >= best - NEAR]
    return min(good, key=lambda c: (c.rank, -c.replay.reuse))
