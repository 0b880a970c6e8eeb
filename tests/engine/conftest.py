"""Models and engines that the engine tests share; see ``engines.py`` for how tests talk to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import Oracle
from oracle.models import save_attention_model, save_hybrid_model

from . import tiny_models
from .engines import Engine, audit, pool_unit_bytes, run_apart

EXAMPLES = Path(__file__).parents[2] / "examples"

EngineFactory = Callable[..., Engine]
Saver = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Saver:
    """``saved(save, *args)``: the folder that ``save(folder, *args)`` writes, in a process of its own."""

    def run(save: Callable[..., object], *args: Any, name: str = "model") -> Path:
        path = tmp_path_factory.mktemp("models") / name
        run_apart(save, path, *args, log=engine_logs / "models.log")
        return path

    return run


@pytest.fixture(scope="session")
def hybrid_model(saved: Saver) -> Path:
    """Four layers, linear and full attention in turn, random with live gates; 512 words."""
    # Untied: with tied embeddings a random model only repeats its last token.
    return saved(partial(save_hybrid_model, tie=False), name="hybrid")


@pytest.fixture(scope="session")
def attention_model(saved: Saver) -> Path:
    """A random dense Qwen3: full attention in every layer, no linear part."""
    return saved(partial(save_attention_model, tie=False), name="attention")


@pytest.fixture(scope="session")
def one_layer_model(saved: Saver) -> Path:
    """A random Qwen3 of one layer: its K and V depend on a token alone, so composing is exact."""
    return saved(tiny_models.save, "Qwen3", {"num_hidden_layers": 1})


@pytest.fixture(scope="module", params=["hybrid", "attention"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each of both models, for modules that name no other."""
    path: Path = request.getfixturevalue(f"{request.param}_model")
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def noise(engine: Engine, oracle: Oracle) -> Any:
    """How far ordinary requests of the module's engine are from the oracle's full recompute."""
    from .test_oracle_agreement import noise_of

    return noise_of(engine, oracle)


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
def engine(_engine: Engine) -> Iterator[Engine]:
    """The module's own ``_engine``, its caches empty; afterwards nothing may be held."""
    yield from lent(_engine)


@pytest.fixture
def hypic(_hypic: Engine) -> Iterator[Engine]:
    """The shared engine with the plugin, its caches empty; afterwards nothing may be held."""
    yield from lent(_hypic)


@pytest.fixture
def chosen(kind: str, request: pytest.FixtureRequest) -> Engine:
    """The shared engine that the test's parameter ``kind`` names."""
    engine: Engine = request.getfixturevalue(kind)
    return engine


@pytest.fixture
def stock(_stock: Engine) -> Engine:
    """The shared engine without the plugin, its prefix cache empty."""
    _stock.reset()
    return _stock
