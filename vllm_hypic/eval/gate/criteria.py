"""Criteria that turn measurements into a verdict.

docs/how-to/choose-for-my-model.md gives the reasons of the limits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...harness.fidelity import distance
from ...harness.report import percent
from ..estimates import Estimate, difference, nll_increase, percentile
from ..runner import MethodAnswer

SURE = 0.5
"""Probability above which full recompute is sure of a first token."""

FAULTS, ANSWERS, TEXTS = "faults", "answers", "texts"
DISTRIBUTIONS, FIRST_TOKENS = "distributions", "first tokens"
"""Names of the criteria."""
ALONE = (FAULTS, TEXTS)
"""Criteria that need no answers, and so can say no-go even if full recompute answers too little."""


class Verdict(StrEnum):
    GO = "go"
    NO_GO = "no-go"
    CANNOT_JUDGE = "cannot judge"
    """Full recompute itself answers too little, so that no loss by reuse could show."""


@dataclass(frozen=True)
class Reason:
    """A criterion and its finding."""

    criterion: str
    holds: bool | None
    """Whether the criterion holds; ``None``: the criterion says nothing here."""
    measured: float | None
    limit: float | None
    says: str
    """Sentence with value and limit."""


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reasons: tuple[Reason, ...]

    @property
    def against(self) -> list[Reason]:
        """Return the reasons that speak against a go: failed criteria, or silent criteria if the gate cannot
        judge."""
        kept_from_go = None if self.verdict is Verdict.CANNOT_JUDGE else False
        return [r for r in self.reasons if r.holds is kept_from_go]

    @staticmethod
    def of(reasons: Sequence[Reason], *, answers: str, alone: Collection[str]) -> Judgement:
        """Return a no-go if a criterion does not hold, else a go.

        If all criteria called ``answers`` say nothing, only criteria named in ``alone`` make a no-go, and the
        verdict is never a go.
        """
        judged = any(r.holds is not None and r.criterion == answers for r in reasons)
        if any(r.holds is False and (judged or r.criterion in alone) for r in reasons):
            verdict = Verdict.NO_GO
        elif judged:
            verdict = Verdict.GO
        else:
            verdict = Verdict.CANNOT_JUDGE
        return Judgement(verdict, tuple(reasons))

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> Judgement:
        """Undo ``dataclasses.asdict``.  Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        names = [f.name for f in dataclasses.fields(Reason)]
        reasons = tuple(Reason(**{name: reason[name] for name in names}) for reason in values["reasons"])
        return Judgement(Verdict(values["verdict"]), reasons)


@dataclass(frozen=True)
class Limits:
    """Limits of a go."""

    loss: float = 3.0
    """Limit on the average loss of answers, in points, unless the interval of the loss reaches 0."""
    certain_loss: float = 1.0
    """Points beyond which the interval of the loss must not lie wholly."""
    kl: float = 0.2
    """Limit on the KL divergence of nine in ten first-token distributions to full recompute's, in nats."""
    times_noise: float = 5.0
    """The same limit as a multiple of the noise floor; the larger of the two limits counts."""
    changed: float = 5.0
    """Limit, in points, on the sure first tokens that change beyond those that change by noise."""
    nll: float = 2.0
    """Percent by which the negative log-likelihood of continued texts may exceed full recompute's."""
    least_right: float = 20.0
    """Points that full recompute itself must score for answers to mean anything."""
    least_reused: float = 95.0
    """Percent of the reusable tokens that must be reused."""


@dataclass(frozen=True)
class Answers:
    """Scores of a set of tasks, in points; a set without a fault has 100."""

    name: str
    metric: str
    """``right``, ``exact match`` or ``F1``."""
    full: float
    reuse: float
    loss: Estimate

    @staticmethod
    def of(name: str, metric: str, full: Sequence[float], reuse: Sequence[float]) -> Answers:
        """Return the scores of a set; ``full[i]`` and ``reuse[i]``, 0 to 1, belong to the same task."""
        return Answers(
            name,
            metric,
            100 * statistics.fmean(full),
            100 * statistics.fmean(reuse),
            difference(full, reuse).times(100),
        )


@dataclass(frozen=True)
class Texts:
    """Mean negative log-likelihood of a token in continued texts, in nats."""

    name: str
    full: float
    reuse: float
    increase: Estimate
    """Increase by reuse, in percent."""

    @staticmethod
    def of(name: str, full: Sequence[float], reuse: Sequence[float]) -> Texts:
        """Return the means of a family; ``full[i]`` and ``reuse[i]`` belong to the same text."""
        return Texts(name, statistics.fmean(full), statistics.fmean(reuse), nll_increase(reuse, full))


@dataclass(frozen=True)
class Distances:
    """Distances of first-token distributions to full recompute's, over all prompts."""

    prompts: int
    kl_median: float
    kl_p90: float
    kl_mean: float
    """Mean KL divergence; all three KL fields are in nats."""
    agreement: float
    """Percent of the prompts with the same most likely token."""
    sure: int
    """Count of prompts of whose first token full recompute is sure."""
    changed: float
    """Percent of sure prompts with another most likely token; 0 without sure prompts."""

    @staticmethod
    def of(references: Sequence[MethodAnswer], others: Sequence[MethodAnswer]) -> Distances:
        """Return the distances of ``others`` to ``references``.

        Raises ``ValueError`` without outcomes, ``KeyError`` if ``others`` have logprobs of other tokens."""
        found = [distance(r.logprobs, o.logprobs) for r, o in zip(references, others, strict=True)]
        sure = [
            d.same_argmax
            for d, r in zip(found, references, strict=True)
            if max(r.logprobs.values()) > math.log(SURE)
        ]
        kl = [d.kl for d in found]
        return Distances(
            prompts=len(found),
            kl_median=statistics.median(kl),
            kl_p90=percentile(kl, 90),
            kl_mean=statistics.fmean(kl),
            agreement=100 * statistics.fmean(d.same_argmax for d in found),
            sure=len(sure),
            changed=100 * (1 - statistics.fmean(sure)) if sure else 0.0,
        )


@dataclass(frozen=True)
class Reuse:
    """Counts of prompt tokens."""

    reused: int
    reusable: int
    """Tokens of sufficiently long segments, without their seams."""


@dataclass(frozen=True)
class Numbers:
    """Measurements of a method; a fault leaves some measurements out."""

    faults: tuple[str, ...] = ()
    """A sentence for each fault."""
    answers: tuple[Answers, ...] = ()
    texts: tuple[Texts, ...] = ()
    reuse: Reuse | None = None
    distances: Distances | None = None
    noise: Distances | None = None
    """Distances of full recompute to full recompute in other chunks."""


def judge(numbers: Numbers, limits: Limits) -> Judgement:
    reasons = [Reason(FAULTS, False, None, None, fault) for fault in numbers.faults]
    if numbers.reuse is not None:
        reasons.append(_reuse(numbers.reuse, limits))
    reasons += [_answers(answers, limits) for answers in numbers.answers]
    reasons += [_texts(texts, limits) for texts in numbers.texts]
    if numbers.distances is not None and numbers.noise is not None:
        reasons.append(_distributions(numbers.distances, numbers.noise, limits))
        reasons.append(_first_tokens(numbers.distances, numbers.noise, limits))
    return Judgement.of(reasons, answers=ANSWERS, alone=ALONE)


def _reuse(reuse: Reuse, limits: Limits) -> Reason:
    if not reuse.reusable:
        says = "nothing can be reused: all segments are too short (seam_tokens, min_segment_tokens, segment)"
        return Reason(FAULTS, False, 0.0, limits.least_reused, says)
    share = 100 * reuse.reused / reuse.reusable
    says = (
        f"{reuse.reused} of {reuse.reusable} reusable tokens were reused, {share:.1f} %; "
        f"at least {limits.least_reused:g} % are expected"
    )
    return Reason(FAULTS, share >= limits.least_reused, share, limits.least_reused, says)


def _answers(answers: Answers, limits: Limits) -> Reason:
    name, loss = f"{answers.name}, {answers.metric}", answers.loss
    if answers.full < limits.least_right:
        says = (
            f"{name}: full recompute itself scores {answers.full:.1f} points, less than "
            f"{limits.least_right:g}, so no loss can show; give easier tasks by --data"
        )
        return Reason(ANSWERS, None, answers.full, limits.least_right, says)
    says = (
        f"{name}: {answers.full:.1f} points recomputed, {answers.reuse:.1f} reused: {loss.value:.1f} lost "
        f"[{loss.low:.1f} to {loss.high:.1f}]; at most {limits.loss:g} may be lost"
    )
    if loss.low > limits.certain_loss:
        says += f", and more than {limits.certain_loss:g} are certainly lost"
        return Reason(ANSWERS, False, loss.low, limits.certain_loss, says)
    if loss.value > limits.loss >= 0 >= loss.low:
        says += ", and this loss may be chance; more --prompts make the interval narrower"
        return Reason(ANSWERS, True, loss.value, limits.loss, says)
    return Reason(ANSWERS, loss.value <= limits.loss, loss.value, limits.loss, says)


def _texts(texts: Texts, limits: Limits) -> Reason:
    more = texts.increase
    says = (
        f"{texts.name}: {texts.full:.3f} nats a token recomputed, {texts.reuse:.3f} reused: "
        f"{more.value:+.1f} % [{more.low:+.1f} to {more.high:+.1f}]; at most {limits.nll:g} % more is allowed"
    )
    return Reason(TEXTS, more.value <= limits.nll, more.value, limits.nll, says)


def _distributions(reuse: Distances, noise: Distances, limits: Limits) -> Reason:
    limit = max(limits.kl, limits.times_noise * noise.kl_p90)
    says = (
        f"nine of ten first-token distributions are within {reuse.kl_p90:.2g} nats of full recompute's "
        f"(noise floor: {noise.kl_p90:.2g}); the limit is {limit:.2g}"
    )
    return Reason(DISTRIBUTIONS, reuse.kl_p90 <= limit, reuse.kl_p90, limit, says)


def _first_tokens(reuse: Distances, noise: Distances, limits: Limits) -> Reason:
    if not reuse.sure:
        says = f"full recompute is sure of no first token: none has a probability above {percent(SURE)}"
        return Reason(FIRST_TOKENS, None, None, limits.changed, says)
    more = reuse.changed - noise.changed
    says = (
        f"reuse changes {reuse.changed:.1f} % of the {reuse.sure} first tokens that full recompute is sure "
        f"of (noise: {noise.changed:.1f} %); the limit is {limits.changed:g} points more than noise"
    )
    return Reason(FIRST_TOKENS, more <= limits.changed, more, limits.changed, says)
