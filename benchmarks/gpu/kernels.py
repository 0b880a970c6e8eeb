"""``kernels``: times of every kernel beside its floors and what it could be replaced by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import torch

from vllm_hypic.harness.report import console, size

from ..lib import report
from ..lib.report import check_outputs, output_options
from . import gate
from .aims import Aim, aims_table
from .delta_checks import check_delta
from .delta_rows import delta_rows
from .device import Facts, device_option
from .findings import Finding
from .floors import Rates, measure_rates
from .more_checks import check_latents, check_mamba2, check_short_conv
from .operators import Operators, operators_for
from .plans import PlanTime, measure_plans, plans_table
from .rows import KernelTimes, rows_table
from .span_checks import check_span
from .span_rows import DECODE, NO_ROTATION, PREFILL, span_rows
from .timing import Timer

KERNELS = {"span": span_rows, "delta": delta_rows}
CHECKS = {
    "span": check_span,
    "delta": check_delta,
    "mamba2": check_mamba2,
    "short_conv": check_short_conv,
    "latents": check_latents,
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@click.command(help="Times of every kernel beside the floors of this device and beside PyTorch's own.")
@device_option
@click.option("--kernels", "chosen", type=click.Choice(["all", *KERNELS]), default="all", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@output_options
@gate.reporting_failures
def kernels(
    device: torch.device, chosen: str, repeats: int, json_path: Path | None, plot_path: Path | None
) -> None:
    check_outputs(json_path, plot_path)
    operators, facts = operators_for(device), Facts.of(device)
    names = list(KERNELS) if chosen == "all" else [chosen]
    to = console()
    to.print(f"{facts}, {operators.name} operators, bfloat16, {repeats} repeats")
    if facts.meaningless:
        to.print(facts.meaningless, style="bold")
    with torch.inference_mode():
        checked = _require_right(operators, device, names)
        timer = Timer(device, repeats)
        rates = measure_rates(timer)
        rows: dict[str, list[KernelTimes]] = {name: [] for name in names}
        for name in names:
            with report.progress(console(), 1, name) as steps:
                for row in KERNELS[name](operators, timer, rates):
                    steps.show(f"{row.kernel}, {row.case}")
                    rows[name].append(row)
        plans = measure_plans(operators, device, repeats)
    to.print(f"copy {size(rates.copy)}/s, bf16 product {rates.matmul / 1e12:.3g} TFLOP/s")
    for name in names:
        to.print(rows_table(name, rows[name]))
    to.print(plans_table(plans))
    to.print(
        f"Gate passed: {checked} errors against float64, and span attention against SDPA in every case timed."
    )
    aims = [] if facts.meaningless else _aims(rows.get("span", []))
    if aims:
        to.print(aims_table(aims))
    if json_path is not None:
        _write(json_path, facts, operators, repeats, rates, rows, plans, aims, checked)
    if plot_path is not None:
        _plot(plot_path, [r for some in rows.values() for r in some], facts)


def run_checks(
    operators: Operators,
    device: torch.device,
    kernels: Sequence[str],
    dtypes: Sequence[str],
    long: bool | None = None,
) -> list[Finding]:
    """Errors of the :data:`CHECKS` ``kernels`` against float64, for each of the :data:`DTYPES` ``dtypes``.

    ``long``: sizes are as in use, not small; ``None``: on a GPU they are.
    """
    long = device.type != "cpu" if long is None else long
    return [
        finding
        for name in kernels
        for dtype in dtypes
        for finding in CHECKS[name](operators, device, DTYPES[dtype], long)
    ]


def _require_right(operators: Operators, device: torch.device, names: Sequence[str]) -> int:
    """How many errors were looked at; raises :class:`gate.GateFailed` when one is too large."""
    found = run_checks(operators, device, names, ("bfloat16",))
    if wrong := [f for f in found if not f.passed]:
        raise gate.GateFailed("; ".join(f"{f.kernel}, {f.case}: {f.error:.2g}" for f in wrong))
    return len(found)


def _aims(rows: Sequence[KernelTimes]) -> list[Aim]:
    """The worst case of each counts."""
    aims = []
    for kernel in (PREFILL, DECODE):
        mine = [r for r in rows if r.kernel == kernel]
        shares = [r.share for r in mine if r.share is not None]
        if shares:
            aims.append(Aim(f"{kernel}: share of the floor, worst case", min(shares), 0.7, True))
            rotation = max(r.ratio(NO_ROTATION).median for r in mine)
            aims.append(Aim(f"{kernel}: with rotation / without, worst case", rotation, 1.03, False))
    return aims


def _write(
    path: Path,
    facts: Facts,
    operators: Operators,
    repeats: int,
    rates: Rates,
    rows: dict[str, list[KernelTimes]],
    plans: Sequence[PlanTime],
    aims: Sequence[Aim],
    checked: int,
) -> None:
    settings = {"device": facts, "operators": operators.name, "repeats": repeats}
    results = {"rates": rates, "kernels": rows, "plans": plans, "aims": aims}
    passed = {"errors_against_float64": checked, "span_attention_equals_sdpa": True}
    report.write_json(
        path,
        report.report("gpu kernels", settings, results, gate=passed, module="benchmarks.gpu"),
    )


def _plot(path: Path, rows: Sequence[KernelTimes], facts: Facts) -> None:
    from ..plots import plot_bars

    bars = {f"{r.kernel}, {r.case}": {"": 100 * r.share} for r in rows if r.share is not None}
    note = ": meaningless" if facts.meaningless else ""
    plot_bars(path, bars, title=f"share of the better floor, {facts}{note}", label="%", line_at=70)
