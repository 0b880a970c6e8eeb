"""The cluster that benchmarks, demos and tests start: nothing of it outlives it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.cluster import Cluster, Setup


class Late:
    """A server whose process appears only after it was stopped for the first time."""

    def __init__(self) -> None:
        self.begun, self.asked, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.running = False

    def start(self) -> None:
        self.begun.set()
        assert self.asked.wait(30)
        self.running = True
        self.ended.wait()
        raise RuntimeError("the server ended while starting")

    def stop(self) -> None:
        if self.running:
            self.ended.set()
        self.asked.set()

    def processes(self) -> list[Any]:
        return []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("interrupted", [False, True], ids=["", "interrupted"])
def test_a_server_that_is_launched_after_its_stop_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Also where Ctrl-C comes before the cluster waits for its servers."""
    cluster, late = Cluster(Setup(tmp_path)), Late()
    submit = cluster._keepers.submit

    def interrupt(*args: Any) -> None:
        submit(*args)
        raise KeyboardInterrupt

    def start() -> None:
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            cluster.start(late)  # type: ignore[arg-type]

    starting = threading.Thread(target=start, daemon=True)
    with monkeypatch.context() as patch:
        if interrupted:
            patch.setattr(cluster._keepers, "submit", interrupt)
        starting.start()
        assert late.begun.wait(30)
        if interrupted:
            starting.join(30)
    cluster._close(keep_logs=False)
    starting.join(30)
    assert late.ended.is_set() and not starting.is_alive()
