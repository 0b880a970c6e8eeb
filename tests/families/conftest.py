"""Engines and models of the families.  See ``contract.py`` for what is shown of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.conftest import EngineFactory, context_file, engine_logs, module_engine, start_engine
from engine.engines import Engine

from .contract import DUMMY, Models, Served
from .rows import Case, LayerCase
from .table import CASES, LAYER_CASES

__all__ = ["context_file", "engine_logs", "module_engine", "start_engine"]

ORDER = {str(case): place for place, case in enumerate([*CASES, *LAYER_CASES])}


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.engine)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one engine follow one another, so that it is started once and closed when they are over."""
    at = [i for i, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    here = [items[i] for i in at]
    files = list(dict.fromkeys(item.path for item in here))
    here.sort(key=lambda item: (files.index(item.path), _place(item)))
    for i, item in zip(at, here, strict=True):
        items[i] = item


def _place(item: pytest.Item) -> int:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return max((ORDER.get(str(value), -1) for value in params.values()), default=-1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Models:
    return Models(tmp_path_factory.mktemp("families"), engine_logs / "models.log")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, module_engine: EngineFactory, models: Models, context_file: Path
) -> Iterator[Served]:
    """The engine of a case, which all its tests share."""
    case: Case = request.param
    folder = models(case.family.name, case.family.save)
    options = {"context_file": str(context_file), "dummy_token": DUMMY}
    with module_engine(folder, max_logprobs=-1, options=options, **case.args()) as engine:
        yield Served.of(case, engine, case.family.oracle(folder))


@pytest.fixture(scope="module")
def layer(
    request: pytest.FixtureRequest, module_engine: EngineFactory, models: Models
) -> Iterator[tuple[Engine, LayerCase]]:
    case: LayerCase = request.param
    folder = models(f"layer-{case.layer.name}", case.layer.save)
    with module_engine(folder, max_logprobs=-1, **case.layer.engine_args(case.dtype)) as started:
        yield started, case
