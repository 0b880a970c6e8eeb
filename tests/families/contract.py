"""What every family of models must show in a real engine: requests and measures that the tests share.

``test_contract.py`` states the contract, ``table.py`` has a row for each family.  Whole models are held
against an independent oracle in float64; models of one layer, behind which composing is exact by the affine
law, against ordinary requests of the same engine.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from engine.conftest import CONTEXT
from engine.engines import Answer, Ask, Engine, prompt, run_apart
from engine.test_contexts_and_islands import asking
from engine.test_oracle_agreement import KL_FACTOR, NOISE_FACTOR, VOCABULARY, Distance, distance, texts, whole
from engine.test_oracle_agreement import METHODS as LINKS
from lib.oracle import Oracle, random_segments
from lib.oracle.oracle import LinearRecord

if TYPE_CHECKING:
    from .rows import Case, OneLayer


@dataclass(frozen=True)
class Text:
    """A prompt's leading segment, interior segments and query."""

    lead: list[int]
    segments: list[list[int]]
    query: list[int]

    @property
    def parts(self) -> tuple[list[int], list[list[int]], list[int]]:
        return self.lead, self.segments, self.query

    @property
    def tokens(self) -> tuple[int, ...]:
        """With separators."""
        return prompt(*self.segments, lead=self.lead, query=self.query)

    @property
    def whole(self) -> list[int]:
        """The logical prompt."""
        return whole(*self.parts)

    def asking(self) -> Self:
        """With words of two documents in the query, so that islands are chosen there."""
        return replace(self, query=asking(self.segments, self.query))


TEXTS = tuple(Text(*parts) for parts in texts())
TEXT = TEXTS[0]
LEAD, (FIRST, SECOND, THIRD), QUERY = TEXT.lead, TEXT.segments, TEXT.query
COMPOSED = Ask(TEXT.tokens)
ONE_TOKEN = replace(TEXT, query=QUERY[:1])
BEHIND_A_TAIL = Ask(ONE_TOKEN.tokens, extra={"hypic_link": "seam-8-0"})
"""Its query of one token stands right behind the last record."""
FAR_AWAY = replace(COMPOSED, tokens=replace(TEXT, lead=[*LEAD, *FIRST, *SECOND]).tokens)
"""The same records at other positions."""
PARTS = random_segments([700, 60, 350], vocab=480, seed=21)
"""A long question and what may follow it."""
DUMMY = 5

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hypic-8": ({}, {}),
    "hypic-2": ({"hypic_seam_tokens": 2}, {"head": 2, "tail": 2}),
    "hypic-1": ({"hypic_seam_tokens": 1}, {"head": 1, "tail": 1}),
    **{name: LINKS[name] for name in ("hypic-0", "seam-3-12", "seam-4-0+32", "epic-8", "block", "naive")},
    "epic-0": ({"hypic_link": "epic-0"}, {"head": 0, "tail": 0, "context": [DUMMY] * 4}),
    "behind-the-lead": ({"hypic_context": "lead"}, {"context": LEAD}),
    "behind-a-text": ({"hypic_context": "text"}, {"context": CONTEXT}),
}
"""Link methods: what a request says, and what the oracle is told."""
SEAMS = ("hypic-8", "hypic-0")


def plain_asks() -> list[Ask]:
    """Ordinary requests of several lengths, that generate beside one another."""
    asks = [COMPOSED, BEHIND_A_TAIL, Ask(prompt(THIRD, query=QUERY)), Ask(tuple(QUERY[:1]))]
    return [replace(ask.plain(), max_tokens=6 + 4 * i) for i, ask in enumerate(asks)]


def whole_vocabulary(step: Mapping[int, float]) -> torch.Tensor:
    """Logprobs ``[vocabulary]`` float64 of one generated token."""
    return torch.tensor([step[token] for token in range(VOCABULARY)], dtype=torch.float64)


def first_token(engine: Engine, ask: Ask) -> torch.Tensor:
    """Logprobs of the whole vocabulary."""
    (answer,) = engine.ask(replace(ask, max_tokens=1, sampling={"logprobs": -1}))
    return whole_vocabulary(answer.first)


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def steps_apart(one: Answer, other: Answer) -> float:
    """Largest difference of a logprob, of all tokens and whatever was generated."""
    pairs = zip(one.logprobs[0], other.logprobs[0], strict=True)
    return max(largest(whole_vocabulary(a), whole_vocabulary(b)) for a, b in pairs)


# -- whole models ----------------------------------------------------------------------------------------


class RoundedT(Oracle):
    """An oracle whose transitions are rounded as the pool holds them."""

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[Any]:
        records = super()._record(tokens, lo, hi)
        return [replace(r, T=r.T.half().to(r.T)) if isinstance(r, LinearRecord) else r for r in records]


@dataclass(frozen=True)
class Served:
    """An engine with a whole model, and the oracle of that.

    ``bound``: how far logprobs may be from the oracle's: in float32 the family's, with no rounding for errors
    to hide in; in bfloat16 what ordinary requests of this engine are away, and a little.
    """

    case: "Case"
    engine: Engine
    oracle: Any
    bound: float = 0.0
    divergence: float = float("inf")
    """Of KL divergences, where they count, too."""

    @classmethod
    def of(cls, case: "Case", engine: Engine, oracle: Any) -> Self:
        family, found = case.family, cls(case, engine, oracle, case.family.bound)
        if case.dtype == "float32":
            return found
        noise = found.ordinary(TEXTS)
        assert NOISE_FACTOR * noise.largest < family.noise, f"ordinary requests: {noise}"
        divergence = KL_FACTOR * noise.kl if family.kl else float("inf")
        return replace(found, bound=NOISE_FACTOR * noise.largest, divergence=divergence)

    @property
    def texts(self) -> tuple[Text, ...]:
        return TEXTS[: self.case.family.texts]

    def ordinary(self, texts: Sequence[Text] = ()) -> Distance:
        """How far ordinary requests, of the family's texts or of these, are from full recompute."""
        texts = texts or self.texts
        ours = [first_token(self.engine, Ask(tuple(text.whole))) for text in texts]
        return distance(ours, [self.oracle.full_logprobs(text.whole) for text in texts])

    def ours(self, extra: dict[str, Any] | None = None) -> list[torch.Tensor]:
        """Answers to the composed texts."""
        return [first_token(self.engine, Ask(text.tokens, extra=extra or {})) for text in self.texts]

    def error(self, ours: Sequence[torch.Tensor], **method: Any) -> float:
        """How far answers to the composed texts are from the oracle's."""
        theirs = [self.oracle.next_token_logprobs(*text.parts, **method) for text in self.texts]
        return self.weighed(distance(ours, theirs))

    def weighed(self, found: Distance) -> float:
        """The largest difference, or what is as many bounds as the KL divergence."""
        return max(found.largest, self.bound * found.kl / self.divergence)

    def beside(self, mixin: type) -> Self:
        """The same engine, and an oracle with this mixin before its class."""
        other = copy(self.oracle)
        other.__class__ = type(mixin.__name__, (mixin, type(other)), {})
        other._runs, other._records = {}, {}
        return replace(self, oracle=other)


# -- one layer -------------------------------------------------------------------------------------------


def exact(engine: Engine, layer: "OneLayer", dtype: str) -> None:
    """Composed requests are full recompute, wherever records stand; leaving T out shows."""
    engine.reset()
    bound = layer.bounds[dtype]
    for ask in (COMPOSED, BEHIND_A_TAIL, FAR_AWAY):
        plain = first_token(engine, ask.plain())
        for tokens in (None, *layer.seams):
            seam = {} if tokens is None else {"hypic_seam_tokens": tokens}
            found = largest(first_token(engine, replace(ask, extra=ask.extra | seam)), plain)
            assert found <= bound, f"{seam}: {found:.1e}"
    if layer.seen:
        plain = first_token(engine, COMPOSED.plain())
        naive = largest(first_token(engine, replace(COMPOSED, extra={"hypic_link": "naive"})), plain)
        assert naive > layer.seen[dtype] * bound, f"leaving T out goes unseen: {naive:.1e}"


# -- models and engines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """Saves tiny models in processes of their own, each once."""

    folder: Path
    log: Path

    def __call__(self, name: str, save: Callable[[Path], Any]) -> Path:
        path = self.folder / name / "model"
        if not path.exists():
            run_apart(save, path, log=self.log)
        return path


def marked(case: Any, fast: bool) -> Any:
    """The parameter, which may be slow."""
    return pytest.param(case, id=str(case), marks=() if fast else pytest.mark.slow)


def each(name: str, cases: Sequence[Any], *, fast: bool = False) -> Any:
    """Parametrise ``name`` by these cases, of which those that represent their family may be fast."""
    params = [marked(case, fast and getattr(case, "fast", False)) for case in cases]
    return pytest.mark.parametrize(name, params, indirect=name in ("served", "layer"))
