"""``checks``: every kernel on small shapes against float64, without times: what a sanitizer can watch."""

from __future__ import annotations

import click
import torch

from ..lib import report
from .device import Facts, device_option
from .kernels import CHECKS, DTYPES, run_checks
from .operators import operators_for


@click.command(help="Every kernel on small shapes against float64, without times: for compute-sanitizer.")
@device_option
@click.option("--kernels", "chosen", type=click.Choice(["all", *CHECKS]), default="all", show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
def checks(device: torch.device, chosen: str, dtype: str) -> None:
    operators, to = operators_for(device), report.console()
    to.print(f"{Facts.of(device)}, {operators.name} operators, {dtype}")
    names = list(CHECKS) if chosen == "all" else [chosen]
    with torch.inference_mode():
        found = run_checks(operators, device, names, [dtype], long=False)
    rows = [(f.kernel, f.case, f"{f.error:.2g}", f"{f.tolerance:.2g}") for f in found]
    to.print(report.table("errors against float64", ("kernel", "case", "error", "allowed"), rows))
    if wrong := [f for f in found if not f.passed]:
        raise click.ClickException("; ".join(f"{f.kernel}, {f.case}: {f.error:.2g}" for f in wrong))
    to.print(f"All {len(found)} errors are within their tolerances.")
