"""Scores an answer against the right answers, and against full recompute's answer."""

from __future__ import annotations

import statistics
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..harness.fidelity import distance
from .runner import MethodAnswer
from .task import Task

ARTICLES = frozenset(("a", "an", "the"))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Scores:
    """Scores of an answer: of its text, the best over the right answers, and of its tokens and logprobs."""

    contains: bool
    """Whether the answer holds the words of a right answer, side by side in their order.  Further words of a
    talkative model do no harm."""
    exact: bool
    """Whether the answer, or its first line, consists of the words of a right answer in their order."""
    f1: float
    """F1 of the words, 0 to 1, as in SQuAD."""
    rouge_l: float
    """F-measure of the longest common subsequence of words, 0 to 1."""
    first_divergence: int | None
    """Index, from 0, of the first token that differs from full recompute's answer; ``None`` without any."""
    kl: float
    """KL divergence of the first token, in nats: see :class:`~vllm_hypic.harness.fidelity.Distance`."""
    same_argmax: bool
    """Whether the most likely first token is full recompute's."""


class Metric(Enum):
    """A score of an answer, 0 to 1; members have the names of fields of :class:`Scores`."""

    CONTAINS = "contains"
    EXACT = "exact"
    F1 = "f1"
    ROUGE_L = "rouge-l"

    @property
    def label(self) -> str:
        return {"CONTAINS": "right", "EXACT": "exact match", "F1": "F1", "ROUGE_L": "ROUGE-L"}[self.name]

    def of(self, scores: Scores) -> float:
        return float(getattr(scores, self.name.lower()))


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation."""

    nll: float
    """Mean negative log-likelihood of the continuation's tokens, in nats."""
    kl: float
    """KL divergence of the first token, in nats: see :class:`~vllm_hypic.harness.fidelity.Distance`."""
    same_argmax: bool
    """Whether the most likely first token is full recompute's."""


def likelihood(outcome: MethodAnswer, reference: MethodAnswer) -> Likelihood:
    """Return the continuation's likelihood; arguments and errors as of :func:`score`."""
    away = distance(reference.logprobs, outcome.logprobs)
    return Likelihood(-statistics.fmean(outcome.forced), away.kl, away.same_argmax)


def score(task: Task, outcome: MethodAnswer, reference: MethodAnswer) -> Scores:
    """Return the scores of an outcome; ``reference``: full recompute's outcome of the same task.

    Raises ``KeyError`` if ``outcome`` lacks the logprob of a most likely token of the reference.
    """
    said = words(outcome.text)
    line = words(first_line(outcome.text))
    right = [words(answer) for answer in task.answers]
    away = distance(reference.logprobs, outcome.logprobs)
    return Scores(
        contains=any(holds(said, answer) for answer in right),
        exact=any(answer in (said, line) for answer in right),
        f1=max(f1(answer, said) for answer in right),
        rouge_l=max(rouge_l(answer, said) for answer in right),
        first_divergence=first_divergence(reference.tokens, outcome.tokens),
        kl=away.kl,
        same_argmax=away.same_argmax,
    )


def words(text: str) -> list[str]:
    """Return lower-case words without punctuation and articles; a text of articles alone keeps them."""
    found = text.lower().translate(_NO_PUNCTUATION).split()
    return [word for word in found if word not in ARTICLES] or found


def holds(said: Sequence[str], right: Sequence[str]) -> bool:
    """Whether ``said`` holds the words of ``right`` side by side."""
    n = len(right)
    return any(list(said[i : i + n]) == list(right) for i in range(len(said) - n + 1))


def first_line(text: str) -> str:
    """Return the first line that is not blank."""
    return next((line for line in text.splitlines() if line.strip()), "")


def f1(right: Sequence[str], said: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words in any order; 1 if both texts are empty."""
    return _harmonic((Counter(right) & Counter(said)).total(), len(right), len(said))


def rouge_l(right: Sequence[str], said: Sequence[str]) -> float:
    """Return the harmonic mean of the longest common subsequence's shares of both; 1 if both are empty."""
    row = [0] * (len(said) + 1)  # row[j]: longest subsequence common to said[:j] and `right` so far
    for word in right:
        before = row
        row = [0]
        for j, other in enumerate(said):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
    return _harmonic(row[-1], len(right), len(said))


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ, or ``None`` for equal sequences.  If one sequence
    begins the other, the index is the shorter length."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def _harmonic(common: int, right: int, said: int) -> float:
    return 2 * common / (right + said) if right + said else 1.0
