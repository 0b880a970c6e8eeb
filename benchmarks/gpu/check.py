"""``check``: every kernel on the device against its float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from vllm_hypic.harness import report
from vllm_hypic.harness.report import REPORT_FILE, check_outputs, console

from .delta_checks import check_delta
from .device import Facts, device_option
from .findings import Finding, findings_table
from .operators import INTERPRET, Operators, interpreting, operators_for
from .span_checks import check_span

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KERNELS = {"span": check_span, "delta": check_delta}
INTERPRETED = ("float32", "float16")
"""Triton 3.9's interpreter computes bfloat16 wrongly."""


@click.command(help="Errors of every kernel against float64; exit code 1 when one is too large.")
@device_option
@click.option("--kernels", type=click.Choice(["all", *KERNELS]), default="all", show_default=True)
@click.option("--json", "json_path", type=REPORT_FILE, help="Also write errors and settings here.")
def check(device: torch.device, kernels: str, json_path: Path | None) -> None:
    check_outputs(json_path, None)
    if device.type == "cpu" and not interpreting():
        sys.exit(_interpreted(kernels, json_path))
    operators, facts = operators_for(device), Facts.of(device)
    to = console()
    interpreted = device.type == "cpu"
    to.print(f"{facts}, {operators.name} operators" + (", in Triton's interpreter" if interpreted else ""))
    names = list(KERNELS) if kernels == "all" else [kernels]
    dtypes = INTERPRETED if interpreted else tuple(DTYPES)
    with torch.inference_mode():
        found = run_checks(operators, device, names, dtypes)
    failed = [f for f in found if not f.passed]
    to.print(findings_table(found))
    if interpreted:
        to.print("bfloat16 was left out: Triton's interpreter computes it wrongly.")
    to.print(f"{len(failed)} of {len(found)} failed." if failed else f"All {len(found)} passed.")
    if json_path is not None:
        settings = {"device": facts, "operators": operators.name, "kernels": names, "dtypes": dtypes}
        report.write_json(
            json_path,
            report.report(
                "gpu check", settings, {"findings": found, "failed": failed}, module="benchmarks.gpu"
            ),
        )
    if failed:
        sys.exit(1)


def run_checks(
    operators: Operators, device: torch.device, kernels: Sequence[str], dtypes: Sequence[str]
) -> list[Finding]:
    """All findings; sizes as in use on a GPU, small ones elsewhere."""
    found: list[Finding] = []
    total = len(kernels) * len(dtypes)
    with report.progress(console(), total, "checking") as steps:
        for name in kernels:
            for dtype in dtypes:
                steps.show(f"{name}, {dtype}")
                found += KERNELS[name](operators, device, DTYPES[dtype], device.type != "cpu")
                steps.done()
    return found


def _interpreted(kernels: str, json_path: Path | None) -> int:
    """This command in a process whose Triton interprets kernels; its exit code.

    The variable counts when Triton is first imported, which this process may have done.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "check", "--device", "cpu", "--kernels", kernels]
    if json_path is not None:
        command += ["--json", str(json_path)]
    return subprocess.run(command, env={**os.environ, INTERPRET: "1"}).returncode
