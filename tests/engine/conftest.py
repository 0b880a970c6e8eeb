"""Models and engines that the engine tests share; see ``engines.py`` for how tests talk to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle.models import save_attention_model, save_hybrid_model

from .engines import Engine, audit, run_apart

EXAMPLES = Path(__file__).parents[2] / "examples"

EngineFactory = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    """Four layers, linear and full attention in turn, random with live gates; 512 words."""
    path = tmp_path_factory.mktemp("models") / "hybrid"
    # Untied: with tied embeddings a random model only repeats its last token.
    return run_apart(partial(save_hybrid_model, tie=False), path, log=engine_logs / "models.log")


@pytest.fixture(scope="session")
def attention_model(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    """A random dense Qwen3: full attention in every layer, no linear part."""
    path = tmp_path_factory.mktemp("models") / "attention"
    return run_apart(partial(save_attention_model, tie=False), path, log=engine_logs / "models.log")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return EXAMPLES / "models" / "tiny-hybrid-qa" / "model"


def _factory(engine_logs: Path) -> Iterator[EngineFactory]:
    started: list[Engine] = []

    def start(model: Path, **options: Any) -> Engine:
        # One busy engine at a time is the rule; idle ones cost memory only.
        log = engine_logs / f"engine-{len(list(engine_logs.iterdir()))}.log"
        engine = Engine(model, log, **options)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def session_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine that lives until the session ends."""
    yield from _factory(engine_logs)


@pytest.fixture(scope="module")
def module_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine that lives until the module's tests are done."""
    yield from _factory(engine_logs)


@pytest.fixture
def start_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine for one test."""
    yield from _factory(engine_logs)


@pytest.fixture(scope="session")
def _hypic(session_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return session_engine(hybrid_model)


@pytest.fixture(scope="session")
def _stock(session_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return session_engine(hybrid_model, hypic=False)


@pytest.fixture
def hypic(_hypic: Engine) -> Iterator[Engine]:
    """The shared engine with the plugin, its caches empty; afterwards nothing may be held."""
    _hypic.reset()
    yield _hypic
    left = _hypic.call(audit)
    assert left.clean, f"the test left something behind: {left}"


@pytest.fixture
def stock(_stock: Engine) -> Engine:
    """The shared engine without the plugin, its prefix cache empty."""
    _stock.reset()
    return _stock
