"""Results of each method, by family of tasks and over all families."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_hypic.eval import estimates
from vllm_hypic.eval.estimates import Estimate, nll_increase
from vllm_hypic.eval.runner import MethodAnswer
from vllm_hypic.eval.scores import Likelihood, Metric, Scores

from ..lib.stats import Spread, share

PERCENT = 100.0


@dataclass(frozen=True)
class Score:
    """A metric's mean in percent, and its difference to full recompute's in points, resampled in pairs."""

    mean: Estimate
    difference: Estimate


@dataclass(frozen=True, kw_only=True)
class MethodRun:
    """A method's results on a family of any kind: distance of first tokens to full recompute's, and costs.
    Counts of tokens are means over prompts."""

    method: str
    kl_median: float
    kl_mean: Estimate
    """KL divergence of the first token to full recompute's, in nats."""
    prompt_tokens: float
    computed_tokens: float
    reused_none: int
    """Count of prompts whose tokens were all computed."""
    first_token: Spread | None
    """Time to first token in seconds, or ``None`` if not measured."""

    @property
    def computed_share(self) -> float:
        return self.computed_tokens / self.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Cell(MethodRun):
    """A method's results on a family of questions."""

    contains: Score
    exact: Score
    f1: Score
    rouge_l: Score
    same_tokens: Estimate
    """Percent of answers with the same tokens as full recompute's."""
    same_argmax: Estimate
    """Percent of prompts with the same most likely first token as full recompute's."""
    first_divergence: float | None
    """Median index, from 0, of the first differing token in answers that differ; ``None`` without such."""
    kl_worst: float
    """The largest KL divergence of a first token, in nats."""

    def score(self, metric: Metric) -> Score:
        found: Score = getattr(self, metric.name.lower())
        return found


@dataclass(frozen=True, kw_only=True)
class TextCell(MethodRun):
    """A method's results on a family of continued texts."""

    nll: Estimate
    """Mean negative log-likelihood of the continuations' tokens, in nats."""
    increase: Estimate
    """Percent by which the mean exceeds full recompute's, resampled in pairs."""


@dataclass(frozen=True)
class FamilyRun:
    """A family with its prompts, the same for all methods."""

    family: str
    prompts: int
    left_out: int
    """Count of prompts that are longer than the engine's context."""


@dataclass(frozen=True)
class FamilyResult(FamilyRun):
    """Results of all methods on a family of questions; full recompute is the first cell."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class TextResult(FamilyRun):
    """Results of all methods on a family of continued texts; full recompute is the first cell."""

    cells: tuple[TextCell, ...]


@dataclass(frozen=True)
class Overall:
    """A method's results over all families, with equal weight for each family."""

    method: str
    mean: Estimate
    """Mean of the metric in percent."""
    difference: Estimate
    """Difference to full recompute, in points."""
    worst_family: str
    worst: Estimate
    """Difference in the worst family."""
    same_tokens: float
    """Percent of answers with the same tokens as full recompute's."""
    kl: float
    """Mean KL divergence over prompts, in nats."""
    computed_share: float
    first_token_speedup: float | None
    """Geometric mean of the factors by which the first token comes sooner than full recompute's."""


def cell(
    method: str,
    outcomes: Sequence[MethodAnswer],
    scores: Sequence[Scores],
    reference: Sequence[Scores],
    first_token: Spread | None = None,
) -> Cell:
    """Return a method's cell.  ``scores`` belong to ``outcomes``; ``reference`` holds full recompute's
    scores of the same tasks in the same order."""

    def compared(metric: Metric) -> Score:
        own, other = [metric.of(s) for s in scores], [metric.of(s) for s in reference]
        counted = metric in (Metric.CONTAINS, Metric.EXACT)
        mean = share([v == 1 for v in own]) if counted else estimates.mean(own)
        return Score(mean.times(PERCENT), estimates.difference(own, other).times(PERCENT))

    kls = [s.kl for s in scores]
    places = [s.first_divergence for s in scores if s.first_divergence is not None]
    return Cell(
        method=method,
        contains=compared(Metric.CONTAINS),
        exact=compared(Metric.EXACT),
        f1=compared(Metric.F1),
        rouge_l=compared(Metric.ROUGE_L),
        same_tokens=share([s.first_divergence is None for s in scores]).times(PERCENT),
        same_argmax=share([s.same_argmax for s in scores]).times(PERCENT),
        first_divergence=statistics.median(places) if places else None,
        kl_median=statistics.median(kls),
        kl_mean=estimates.mean(kls),
        kl_worst=max(kls),
        prompt_tokens=statistics.mean(o.prompt_tokens for o in outcomes),
        computed_tokens=statistics.mean(o.computed for o in outcomes),
        reused_none=sum(o.cached == 0 for o in outcomes),
        first_token=first_token,
    )


def text_cell(
    method: str,
    outcomes: Sequence[MethodAnswer],
    found: Sequence[Likelihood],
    reference: Sequence[Likelihood],
    first_token: Spread | None = None,
) -> TextCell:
    """Return a method's cell.  ``found`` belongs to ``outcomes``; ``reference`` holds full recompute's
    likelihoods of the same texts in the same order."""
    own, base = [one.nll for one in found], [one.nll for one in reference]
    kls = [one.kl for one in found]
    return TextCell(
        method=method,
        nll=estimates.mean(own),
        increase=nll_increase(own, base),
        kl_median=statistics.median(kls),
        kl_mean=estimates.mean(kls),
        prompt_tokens=statistics.mean(o.prompt_tokens for o in outcomes),
        computed_tokens=statistics.mean(o.computed for o in outcomes),
        reused_none=sum(o.cached == 0 for o in outcomes),
        first_token=first_token,
    )


def overall(
    results: Sequence[FamilyResult],
    scores: Mapping[str, Mapping[str, Sequence[Scores]]],
    metric: Metric,
) -> list[Overall]:
    """Return all methods over all families, in the order of the first family's cells; scores are
    ``scores[family][method]``."""
    full = results[0].cells[0].method
    return [_over_families(c.method, full, results, scores, metric) for c in results[0].cells]


def _over_families(
    method: str,
    full: str,
    results: Sequence[FamilyResult],
    scores: Mapping[str, Mapping[str, Sequence[Scores]]],
    metric: Metric,
) -> Overall:
    cells = {r.family: next(c for c in r.cells if c.method == method) for r in results}
    own = [[metric.of(s) for s in scores[family][method]] for family in cells]
    other = [[metric.of(s) for s in scores[family][full]] for family in cells]
    gaps = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(own, other, strict=True)]
    worst = min(cells, key=lambda family: cells[family].score(metric).difference.value)
    ratios = [
        base.first_token.median / found.first_token.median
        for base, found in ((r.cells[0], cells[r.family]) for r in results)
        if base.first_token is not None and found.first_token is not None
    ]
    return Overall(
        method=method,
        mean=estimates.mean_of_means(own).times(PERCENT),
        difference=estimates.mean_of_means(gaps).times(PERCENT),
        worst_family=worst,
        worst=cells[worst].score(metric).difference,
        same_tokens=statistics.mean(c.same_tokens.value for c in cells.values()),
        kl=statistics.mean(c.kl_mean.value for c in cells.values()),
        computed_share=statistics.mean(c.computed_share for c in cells.values()),
        first_token_speedup=statistics.geometric_mean(ratios) if len(ratios) == len(cells) else None,
    )
