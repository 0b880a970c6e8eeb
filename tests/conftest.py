"""Settings of all tests, and how pytest-xdist shares the tests out to workers."""

import gc
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from lib import unchanged

from benchmarks.lib import pretrained

# One thread a process, unless a test asks for more: a team of threads, bound to cores that somebody else is
# busy on, takes a hundred times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# No test speaks TLS, and httpx reads all certificates for each request, in 30 ms: this folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A slow machine is no fault of the code. A commit must not pass on one day and fail on the next: examples are
# the same in every run, until somebody looks for new ones with HYPOTHESIS_PROFILE=random.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

LOG_LEVEL = {name: value for name, value in os.environ.items() if name == "VLLM_LOGGING_LEVEL"}
ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds by file, or by folder where one worker takes it whole, for each ``-m``: ``make durations``."""
UNKNOWN_S = 60.0
"""Assumed duration of a file without an entry: a worker begins with it, in case the file takes long."""


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Routers and engines of a test run share a secret of their own, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """No file of tests sees variables that another file leaves, as vLLM does where it describes an engine."""
    before = {**os.environ}
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that run in this process make vLLM's log quiet; servers of later tests must write theirs."""
    yield
    os.environ.pop("VLLM_LOGGING_LEVEL", None)
    os.environ.update(LOG_LEVEL)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One process imports vLLM for all workers of pytest-xdist, whose servers are forks of it."""
    if find_spec("vllm"):
        from lib import forked

        forked.shared = node.workerinput["forks"] = forked.shared or forked.share()


@pytest.fixture(scope="session", autouse=True)
def _forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers that tests start, LMCache's too, are forked from a process that has imported vLLM: 3 s instead
    of 25."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm"):
            from lib import forked

            from benchmarks import services
            from benchmarks.lib import serving

            forked.shared = getattr(request.config, "workerinput", {}).get("forks")
            for module in (serving, services):
                patch.setattr(module, "launch", forked.launch)
        yield


@pytest.fixture
def as_users_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this test are started by their command."""
    from benchmarks.lib import processes, serving

    monkeypatch.setattr(serving, "launch", processes.launch)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where nobody has fetched it."""
    try:
        return pretrained.find_model(pretrained.SMOLLM2)
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


FAMILY = re.compile(r"families/test_contract\.py::.*?\[(?:\d+-)?(.+?)(?:-(?:float32|bfloat16).*)?\]$")
"""Finds the family's name in the id of a test of the contract."""


def scope(nodeid: str) -> str:
    """The unit; of the families' contract, which has most of the slow tests, one family's part."""
    found = FAMILY.search(nodeid)
    return f"{unit(nodeid)}::{found[1]}" if found else unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and ten thousand tests are made to stay: the garbage collector need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="keep what files took in durations.json")


_took: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[unit(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        runs = json.loads(DURATIONS.read_text())
        known = {name: s for name, s in _known(session.config, runs).items() if (ROOT / name).exists()}
        known |= {name: round(seconds, 1) for name, seconds in _took.items()}
        runs[session.config.option.markexpr] = dict(sorted(known.items()))
        DURATIONS.write_text(json.dumps(runs, indent=1) + "\n")


def _known(config: pytest.Config, runs: dict[str, dict[str, float]]) -> dict[str, float]:
    return runs.get(config.option.markexpr, {})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what ``fast`` leaves out, and what has not changed.  Workers begin with the longest files."""
    groups = unchanged.left_out()
    for item in items:
        if unchanged.group_of(item.nodeid) in groups:
            item.add_marker(pytest.mark.slow)
    slow: dict[str, list[bool]] = {}
    for item in items:
        if (mark := item.get_closest_marker("fast")) and hasattr(item, "callspec"):
            left_out = item.callspec.id not in mark.args
            slow.setdefault(item.nodeid.partition("[")[0], []).append(left_out)
            if left_out:
                item.add_marker(pytest.mark.slow)
    # A command that names single tests may leave out every fast parameter of a test.
    chosen = any("::" in argument for argument in config.args)
    for test, found in slow.items():
        if not chosen and len(found) > 1 and all(found):
            raise pytest.UsageError(f"{test}: no parameter has an id that its mark 'fast' names")
    if hasattr(config, "workerinput"):
        took = _known(config, json.loads(DURATIONS.read_text()))
        items.sort(key=lambda item: (-took.get(unit(item.nodeid), UNKNOWN_S), unit(item.nodeid)))
