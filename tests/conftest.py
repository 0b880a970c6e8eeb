"""Settings of all tests, and how they are shared out to two workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from vllm_hypic.harness import pretrained

# One thread a process, unless a test asks for more: a team of threads, bound to cores that somebody else is
# busy on, takes a hundred times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

# A slow machine is no fault of the code. A commit must not pass on one day and fail on the next: examples are
# the same in every run, until somebody looks for new ones with HYPOTHESIS_PROFILE=random.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Routers and engines of a test run share a secret of their own, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where nobody has fetched it."""
    try:
        return pretrained.smollm2()
    except pretrained.MissingModel as e:
        pytest.skip(str(e))


@cache
def _has_one_worker(folder: str) -> bool:
    conftest = ROOT / folder / "conftest.py"
    return conftest.exists() and "\nONE_WORKER = True" in conftest.read_text()


def unit(nodeid: str) -> str:
    """What one worker runs as a whole: a file, or a folder whose ``conftest.py`` says ``ONE_WORKER``."""
    file = nodeid.split("::")[0]
    folder = file.rpartition("/")[0]
    return folder if _has_one_worker(folder) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what ``fast`` leaves out.  Workers begin with what takes longest: whatever holds an engine."""
    slow: dict[str, list[bool]] = {}
    for item in items:
        if (mark := item.get_closest_marker("fast")) and hasattr(item, "callspec"):
            left_out = item.callspec.id not in mark.args
            slow.setdefault(item.nodeid.partition("[")[0], []).append(left_out)
            if left_out:
                item.add_marker(pytest.mark.slow)
    for test, found in slow.items():
        if len(found) > 1 and all(found):
            raise pytest.UsageError(f"{test}: no parameter has an id that its mark 'fast' names")
    if hasattr(config, "workerinput"):
        long = {unit(item.nodeid) for item in items if item.get_closest_marker("engine")}
        items.sort(key=lambda item: unit(item.nodeid) not in long)
