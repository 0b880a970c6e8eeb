"""``segment-parallel``: what it refuses, before any server starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import segment_parallel as module
from benchmarks.__main__ import main


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(module, "Cluster", started)
    monkeypatch.setattr(module, "random_model", started)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--size", "huge"], "'huge' is not one of"),
        (["--model", "/nowhere"], "'/nowhere' does not exist"),
        (["--model", "EMPTY"], "no config.json there"),
        (["--model", "EMPTY", "--size", "tiny"], "give one of the two"),
        (["--repeats", "0"], "0 is not in the range 1<=x<=100"),
        (["--threads", "0"], "0 is not in the range 1<=x<=512"),
        (["--seed", "x"], "'x' is not a valid integer"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
        (["--plot", "x.png"], "No such option"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(arguments: list[str], told: str, tmp_path: Path):
    arguments = [str(tmp_path) if a == "EMPTY" else a for a in arguments]
    done = CliRunner().invoke(main, ["segment-parallel", *arguments])
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.output.split())


def test_good_ones_reach_the_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A cluster of the model and the threads that were named, eager unless it is asked to compile."""
    (tmp_path / "config.json").write_text("{}")
    asked = []

    class NoCluster:
        def __init__(self, setup: object) -> None:
            asked.append(setup)

        def __enter__(self) -> NoCluster:
            raise module.ServerError("no servers today")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(module, "Cluster", NoCluster)
    done = CliRunner().invoke(main, ["segment-parallel", "--model", str(tmp_path), "--threads", "2"])
    assert done.exit_code == 1 and "no servers today" in done.output
    [setup] = asked
    assert (setup.model, setup.threads, setup.eager, setup.workers) == (tmp_path, 2, True, 2)
