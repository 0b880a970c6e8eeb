"""Models and engines that the engine tests share; see ``engines.py`` for how tests talk to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle.models import save_attention_model, save_hybrid_model

from .engines import Engine, audit, pool_unit_bytes, run_apart

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


@pytest.fixture(scope="package")
def shared_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine that lives until the tests of this folder are done."""
    yield from _factory(engine_logs)


@pytest.fixture(scope="module")
def module_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine that lives until the module's tests are done."""
    yield from _factory(engine_logs)


@pytest.fixture
def start_engine(engine_logs: Path) -> Iterator[EngineFactory]:
    """Start an engine for one test."""
    yield from _factory(engine_logs)


@pytest.fixture(scope="package")
def _hypic(shared_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return shared_engine(hybrid_model)


@pytest.fixture(scope="package")
def _stock(shared_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return shared_engine(hybrid_model, hypic=False)


def tight_args() -> dict[str, Any]:
    """A KV cache of a few blocks (requests get preempted) and chunks of 256 tokens."""
    return {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 32,
        "max_model_len": 2560,
        "num_gpu_blocks_override": 12,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }


TIGHT_PAGES = 10
"""Pages of 32 tokens per segment in a tight engine's pool of three."""


def tight_options(units: tuple[int, int], *, slots: int = 3, pages: int = 3 * TIGHT_PAGES) -> dict[str, Any]:
    """A pool of so many places for states and pages; ``units``: bytes of a page and a place."""
    page, slot = units
    return {
        "page_tokens": 32,
        "expected_segment_tokens": 32 * pages // slots,
        "pool_bytes": slots * slot + pages * page,
        "expected_live_heads": 1.0,
        "store": {"eviction": "lru"},
    }


@pytest.fixture(scope="package")
def _tight(shared_engine: EngineFactory, hybrid_model: Path, _hypic: Engine) -> Engine:
    options = tight_options(_hypic.call(pool_unit_bytes))
    return shared_engine(hybrid_model, options=options, **tight_args())


@pytest.fixture(scope="package")
def _overlapped(shared_engine: EngineFactory, hybrid_model: Path, _hypic: Engine) -> Engine:
    options = tight_options(_hypic.call(pool_unit_bytes))
    args = tight_args() | {"enable_prefix_caching": True, "num_gpu_blocks_override": 20}
    return shared_engine(hybrid_model, options=options, overlap=True, **args)


@pytest.fixture
def tight(_tight: Engine) -> Iterator[Engine]:
    """A shared engine with :func:`tight_args` and a pool of three segments of 320 tokens."""
    yield from lent(_tight)


@pytest.fixture
def overlapped(_overlapped: Engine) -> Iterator[Engine]:
    """Like ``tight``, with asynchronous scheduling and prefix caching."""
    yield from lent(_overlapped)


def lent(engine: Engine, begin: Callable[[Engine], object] = Engine.reset) -> Iterator[Engine]:
    """For one test: the engine begins empty, and nothing is under way afterwards."""
    begin(engine)
    yield engine
    left = engine.call(audit)
    assert left.clean, f"the test left something behind: {left}"


@pytest.fixture
def hypic(_hypic: Engine) -> Iterator[Engine]:
    """The shared engine with the plugin, its caches empty; afterwards nothing may be held."""
    yield from lent(_hypic)


@pytest.fixture
def stock(_stock: Engine) -> Engine:
    """The shared engine without the plugin, its prefix cache empty."""
    _stock.reset()
    return _stock
