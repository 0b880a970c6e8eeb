"""Models and engines that the engine tests share; see ``engines.py`` for how tests talk to them."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import Oracle
from lib.oracle.models import save_attention_model, save_hybrid_model

from . import tiny_models
from .engines import FIRST_WORD, Engine, pool_unit_bytes, run_apart

EXAMPLES = Path(__file__).parents[2] / "examples"

EngineFactory = Callable[..., Engine]
Saver = Callable[..., Path]
Use = Callable[[Engine], object]


def pytest_itemcollected(item: pytest.Item) -> None:
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
    return request.getfixturevalue(f"{request.param}_model")


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


shared_engine, module_engine, start_engine = (
    pytest.fixture(_factory, scope=scope) for scope in ("package", "module", "function")
)
"""Start an engine that lives until the tests of this folder are done, those of the module, or one test."""


@pytest.fixture(scope="package")
def _hypic(shared_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return shared_engine(hybrid_model)


@pytest.fixture(scope="package")
def _stock(shared_engine: EngineFactory, hybrid_model: Path) -> Engine:
    return shared_engine(hybrid_model, hypic=False)


def tight_args() -> dict[str, Any]:
    """A KV cache of a few blocks (requests get preempted) and chunks of 256 tokens."""
    return {
        **{"max_num_batched_tokens": 256, "max_num_seqs": 32, "max_model_len": 2560},
        **{"num_gpu_blocks_override": 12, "enable_prefix_caching": False, "disable_log_stats": False},
    }


OLD, NEW = "old", "new"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two adapters."""
    folder = tmp_path_factory.mktemp("kinds")
    for seed, kind in enumerate((OLD, NEW)):
        tiny_models.save_adapter(folder / kind, seed)
    return folder


CONTEXT = [FIRST_WORD + (7 * i) % 400 for i in range(90)]
"""What the fixed context says, as token ids of these models."""


def words(tokens: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def context_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context") / "context.txt"
    path.write_text(words(CONTEXT))
    return path


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A disk tier of the module's engine."""
    return {"type": "disk", "path": str(tmp_path_factory.mktemp("disk")), "bytes": 64 << 20}


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
def units(_hypic: Engine) -> tuple[int, int]:
    """Bytes of a page and a place of the hybrid model's pool."""
    return _hypic.call(pool_unit_bytes)


@pytest.fixture(scope="package")
def _tight(shared_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int]) -> Engine:
    return shared_engine(hybrid_model, options=tight_options(units), **tight_args())


@pytest.fixture(scope="package")
def _overlapped(shared_engine: EngineFactory, hybrid_model: Path, units: tuple[int, int]) -> Engine:
    args = tight_args() | {"enable_prefix_caching": True, "num_gpu_blocks_override": 20}
    return shared_engine(hybrid_model, options=tight_options(units), overlap=True, **args)


def checked(engine: Engine) -> Iterator[Engine]:
    """For a module: nothing is under way when its tests are over, and the engine ends."""
    with engine:
        yield engine
        engine.check_clean()


def lent(name: str, begin: Use = Engine.reset, end: Use = Engine.check_clean) -> Any:
    """A fixture: the engine of the fixture ``name``, which begins a test empty; afterwards nothing may be
    held."""

    def lend(**given: Engine) -> Iterator[Engine]:
        begin(given[name])
        yield given[name]
        end(given[name])

    # That pytest sees what the fixture needs: parameters of the other one are the test's.
    lend.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY)])  # type: ignore[attr-defined]
    return pytest.fixture(lend)


engine = lent("_engine")
"""The module's own."""
hypic = lent("_hypic")
"""The shared engine with the plugin."""
tight = lent("_tight")
"""A shared engine with :func:`tight_args` and a pool of three segments of 320 tokens."""
overlapped = lent("_overlapped")
"""Like ``tight``, with asynchronous scheduling and prefix caching."""


@pytest.fixture
def chosen(kind: str, request: pytest.FixtureRequest) -> Engine:
    """The shared engine that the test's parameter ``kind`` names."""
    return request.getfixturevalue(kind)


@pytest.fixture
def stock(_stock: Engine) -> Engine:
    """The shared engine without the plugin, its prefix cache empty."""
    _stock.reset()
    return _stock
