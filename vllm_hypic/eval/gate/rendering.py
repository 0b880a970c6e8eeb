"""Formats numbers and reasons for readers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from ...harness.report import table
from .criteria import Judgement, Numbers, Verdict

STYLES = {Verdict.GO: "bold green", Verdict.NO_GO: "bold red", Verdict.CANNOT_JUDGE: "bold yellow"}
MARKS = {True: "holds", False: "fails", None: "silent"}


def numbers_table(method: str, numbers: Numbers) -> Table:
    """Return a table with columns for full recompute, for reuse, and for full recompute in other chunks."""
    return table("", ("", "full recompute", method, "noise floor"), _rows(numbers))


def _rows(numbers: Numbers) -> Iterator[tuple[str, str, str, str]]:
    for one in numbers.answers:
        loss = f"{one.reuse:.1f}"
        yield f"{one.name}: {one.metric}, points", f"{one.full:.1f}", loss, ""
        low_high = f"{one.loss.value:.1f} [{one.loss.low:.1f} to {one.loss.high:.1f}]"
        yield f"  lost, of {one.loss.n} prompts", "", low_high, ""
    for text in numbers.texts:
        yield f"{text.name}: NLL, nats a token", f"{text.full:.3f}", f"{text.reuse:.3f}", ""
        more = text.increase
        interval = f"{more.value:+.1f} % [{more.low:+.1f} to {more.high:+.1f}]"
        yield f"  more, of {more.n} texts", "", interval, ""
    if numbers.distances is not None and numbers.noise is not None:
        pair = (numbers.distances, numbers.noise)

        def row(name: str, text: str, field: str) -> tuple[str, str, str, str]:
            reuse, noise = (text.format(getattr(one, field)) for one in pair)
            return name, "", reuse, noise

        yield row("KL of the first token, nats: median", "{:.2g}", "kl_median")
        yield row("  90th percentile", "{:.2g}", "kl_p90")
        yield row("  mean", "{:.2g}", "kl_mean")
        yield row("same first token", "{:.1f} %", "agreement")
        yield row("sure first tokens that change", "{:.1f} %", "changed")
    if numbers.reuse is not None:
        yield "tokens reused of reusable", "", f"{numbers.reuse.reused} of {numbers.reuse.reusable}", ""


def reasons_text(judgement: Judgement) -> Text:
    """Return the verdict with a line for each reason."""
    text = Text(judgement.verdict.upper(), style=STYLES[judgement.verdict])
    for reason in judgement.reasons:
        text.append(f"\n  {MARKS[reason.holds]:6}  {reason.criterion}: {reason.says}", style="default")
    return text
