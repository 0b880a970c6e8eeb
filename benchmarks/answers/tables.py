"""Formats results as tables and sentences."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_hypic.eval.estimates import Estimate
from vllm_hypic.eval.methods import FULL
from vllm_hypic.eval.scores import Metric
from vllm_hypic.harness.report import percent, table

from ..lib.report import seconds
from .methods import PLAIN, is_noise
from .results import Cell, FamilyResult, Overall, TextCell, TextResult

COLUMNS = (
    "",
    "right, %",
    "to full, points",
    "exact",
    "F1",
    "ROUGE-L",
    "same tokens",
    "KL",
    "computed",
    "warm TTFT",
)
TEXT_COLUMNS = ("", "NLL, nats a token", "to full, %", "KL", "computed", "warm TTFT")


COMPUTE_ALL = {method.name for method in PLAIN.values()}
"""Names of methods that have no segments to reuse."""
WIDTH = 156
"""Characters in a line of the tables."""


def wide_console() -> Console:
    """Return a console that is wide enough for the tables, also when the output is a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def family_table(result: FamilyResult) -> Table:
    """Return a table with a row for each method."""
    return _plain(table(f"{result.family}, {result.prompts} prompts", COLUMNS, map(_row, result.cells)))


def _row(c: Cell) -> list[str]:
    return [
        c.method,
        with_interval(c.contains.mean),
        "" if c.method == FULL.name else with_interval(c.contains.difference, sign="+"),
        f"{c.exact.mean.value:.1f}",
        f"{c.f1.mean.value:.1f}",
        f"{c.rouge_l.mean.value:.1f}",
        f"{c.same_tokens.value:.1f} %",
        f"{c.kl_median:.2g}",
        f"{c.computed_tokens:.0f}",
        "" if c.first_token is None else seconds(c.first_token.median),
    ]


def text_table(result: TextResult) -> Table:
    """Return a table with a row for each method."""
    title = f"{result.family}, {result.prompts} texts"
    return _plain(table(title, TEXT_COLUMNS, map(_text_row, result.cells)))


def _text_row(c: TextCell) -> list[str]:
    return [
        c.method,
        f"{c.nll.value:.3f} [{c.nll.low:.3f}, {c.nll.high:.3f}]",
        "" if c.method == FULL.name else with_interval(c.increase, sign="+"),
        f"{c.kl_median:.2g}",
        f"{c.computed_tokens:.0f}",
        "" if c.first_token is None else seconds(c.first_token.median),
    ]


def overall_table(rows: Sequence[Overall], families: int, metric: Metric) -> Table:
    """Return a table of means over families, with a row for each method."""
    columns = (
        "",
        f"{metric.value}, %",
        "to full, points",
        "worst family",
        "",
        "same",
        "mean KL",
        "computed",
        "TTFT",
    )
    return _plain(
        table(
            f"mean over {families} families",
            columns,
            [
                [
                    r.method,
                    with_interval(r.mean),
                    "" if r.method == FULL.name else with_interval(r.difference, sign="+"),
                    "" if r.method == FULL.name else with_interval(r.worst, sign="+"),
                    "" if r.method == FULL.name else r.worst_family,
                    f"{r.same_tokens:.1f} %",
                    f"{r.kl:.2g}",
                    percent(r.computed_share),
                    "" if r.first_token_speedup is None else f"full / {r.first_token_speedup:.1f}",
                ]
                for r in rows
            ],
        )
    )


def notes(result: FamilyResult | TextResult) -> list[str]:
    """Return sentences that a reader of the family's table must know."""
    found = []
    if result.left_out:
        found.append(f"{result.family}: {result.left_out} prompts do not fit the context and were left out.")
    if isinstance(result, FamilyResult) and result.cells[0].contains.mean.value == 0:
        found.append(
            f"{result.family}: full recompute has no right answer, so reuse can lose none: compare F1, "
            "ROUGE-L, same tokens and KL."
        )
    for c in result.cells:
        if c.reused_none and not is_noise(c.method) and c.method not in COMPUTE_ALL:
            found.append(
                f"{result.family}: {c.method} reused nothing in {c.reused_none} of {result.prompts} prompts, "
                "whose segments are too short for its seams."
            )
    return found


def with_interval(e: Estimate, sign: str = "") -> str:
    """Format an estimate as ``98.2 [96.9, 99.1]``, or as ``0`` if it is a difference and all values are 0."""
    if sign and e.value == e.low == e.high == 0:
        return "0"
    return f"{e.value:{sign}.1f} [{e.low:{sign}.1f}, {e.high:{sign}.1f}]"


def _plain(found: Table) -> Table:
    """Remove the lines between columns, because the table has many columns."""
    found.box = SIMPLE_HEAD
    return found
