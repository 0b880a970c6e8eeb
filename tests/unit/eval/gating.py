"""The gate's command on real engines, which start once and measure every method that a test asks for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_hypic.cli import main
from vllm_hypic.eval.gate import command
from vllm_hypic.eval.gate.measure import GateEngines, GateMeasurement
from vllm_hypic.eval.gate.signoff import SignOff, read
from vllm_hypic.eval.methods import Method


@dataclass(frozen=True)
class Judged:
    """``said``: what the command printed."""

    exit_code: int
    said: str
    sign_off: SignOff

    @property
    def against(self) -> set[str]:
        return {reason.criterion for reason in self.sign_off.judgement.against}

    def numbers(self, what: str) -> Any:
        return self.sign_off.evidence["numbers"][what]

    def holds(self, criterion: str) -> bool:
        reasons = [r for r in self.sign_off.judgement.reasons if r.criterion == criterion]
        return bool(reasons) and all(r.holds for r in reasons)


def gate(model: Path, folder: Path, *options: str) -> Judged:
    """The command's verdict, whose sign-off goes to ``folder``."""
    before = set(folder.glob("*"))
    small = ("--eager", "--threads", "1", "--kv-gib", "0.5", "--timeout-s", "400")
    arguments = ["gate", str(model), "--folder", str(folder), *small, *options]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    found = set(folder.glob("*")) - before
    assert len(found) == 1, result.output
    return Judged(result.exit_code, result.output, read(found.pop()))


@contextmanager
def measuring_once(*also: Method) -> Iterator[None]:
    """The first call of the command measures ``also``, too, and later calls get their part of that."""
    measured: list[GateMeasurement] = []
    measure: Callable[..., GateMeasurement] = command.measure

    def once(engines: GateEngines, methods: Sequence[Method], *args: Any, **options: Any) -> GateMeasurement:
        if not measured:
            measured.append(measure(engines, (*methods, *also), *args, **options))
        asked = {(method.link, method.mode) for method in methods}
        numbers = {m: n for m, n in measured[0].numbers.items() if (m.link, m.mode) in asked}
        return replace(measured[0], numbers=numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", once)
        yield
