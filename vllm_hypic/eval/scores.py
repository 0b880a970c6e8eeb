"""What one answer is worth: against the right answers, and against full recompute's."""

from __future__ import annotations

import statistics
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..harness.fidelity import distance
from .runner import MethodAnswer
from .task import Task

ARTICLES = frozenset(("a", "an", "the"))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Scores:
    """The first four are of the text, best over the right answers; the others are of tokens and logprobs."""

    contains: bool
    """The words of a right answer stand in the answer, side by side and in their order: what else a talkative
    model says does not count against it."""
    exact: bool
    """The answer, or its first line where the model went on, has the words of a right one in their order."""
    f1: float
    """F1 of the words, as SQuAD counts it: 0 to 1."""
    rouge_l: float
    """F-measure of the longest common subsequence of words: 0 to 1."""
    first_divergence: int | None
    """Output token, from 0, where it leaves full recompute's answer; ``None``: it never does."""
    kl: float
    """KL divergence of the first token, in nats: see :class:`~vllm_hypic.harness.fidelity.Distance`."""
    same_argmax: bool
    """The most likely first token is full recompute's."""


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is."""

    nll: float
    """Mean negative log-likelihood of its tokens, in nats."""
    kl: float
    """KL divergence of the first token, in nats: see :class:`~vllm_hypic.harness.fidelity.Distance`."""
    same_argmax: bool
    """The most likely first token is full recompute's."""


def likelihood(outcome: MethodAnswer, reference: MethodAnswer) -> Likelihood:
    """``reference``: full recompute's outcome of the same task.  Raises as :func:`score`."""
    away = distance(reference.logprobs, outcome.logprobs)
    return Likelihood(-statistics.fmean(outcome.forced), away.kl, away.same_argmax)


def score(task: Task, outcome: MethodAnswer, reference: MethodAnswer) -> Scores:
    """``reference``: full recompute's outcome of the same task.

    Raises ``KeyError`` when ``outcome`` lacks the logprob of one of the reference's most likely tokens.
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
    """Lower-case words without punctuation and English articles; a text of articles alone keeps them."""
    found = text.lower().translate(_NO_PUNCTUATION).split()
    return [word for word in found if word not in ARTICLES] or found


def holds(said: Sequence[str], right: Sequence[str]) -> bool:
    """``right`` stands in ``said``, word by word."""
    n = len(right)
    return any(list(said[i : i + n]) == list(right) for i in range(len(said) - n + 1))


def first_line(text: str) -> str:
    """The first line that is not blank."""
    return next((line for line in text.splitlines() if line.strip()), "")


def f1(right: Sequence[str], said: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, whatever their order; 1 where both are empty."""
    return _harmonic((Counter(right) & Counter(said)).total(), len(right), len(said))


def rouge_l(right: Sequence[str], said: Sequence[str]) -> float:
    """Harmonic mean of the shares that the longest common subsequence has of both; 1 where both are empty."""
    row = [0] * (len(said) + 1)  # row[j]: longest one of what was read of `right` and of said[:j]
    for word in right:
        before = row
        row = [0]
        for j, other in enumerate(said):
            row.append(before[j] + 1 if word == other else max(before[j + 1], row[j]))
    return _harmonic(row[-1], len(right), len(said))


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """First index at which the two differ; where one is the other's beginning, the length of that."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def _harmonic(common: int, right: int, said: int) -> float:
    return 2 * common / (right + said) if right + said else 1.0
