"""Adapters (LoRA) whose files get other weights under one name and path: no answer is from records of before.

K and V of a model of one attention layer depend on a token alone, so composing is exact.
"""

import shutil
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import random_segments

from .conftest import NEW, OLD, EngineFactory
from .engines import Answer, Ask, Engine, EngineError, begin, generate, prompt, same, scheduler_of
from .test_kv_events import EVENTS, LAST, published
from .test_resets import half_computed
from .test_store import on_disk, stored

LEAD, ONE, TWO, QUERY = random_segments([40, 150, 400, 21], vocab=480, seed=7)
ASK = Ask(prompt(ONE, TWO, lead=LEAD, query=QUERY))
ARGS = {"dtype": "float32", "max_num_batched_tokens": 256, "enable_lora": True, "max_loras": 1}
IDS = count(1)


@dataclass(frozen=True)
class Adapter:
    """An adapter as requests name it."""

    path: str
    id: int = field(default_factory=lambda: next(IDS))
    in_place: bool = False
    name: str = "adapter"

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.id, self.path, load_inplace=self.in_place)


def load(llm: Any, adapter: Adapter) -> None:
    """As ``/v1/load_lora_adapter`` does it."""
    assert llm.llm_engine.add_lora(adapter.request())


def remove(llm: Any, adapter: Adapter) -> None:
    assert llm.llm_engine.remove_lora(adapter.id)


def answers(llm: Any, adapter: Adapter, *asks: Ask) -> list[Answer]:
    return [generate(llm, [ask], lora_request=adapter.request())[0] for ask in asks]


@dataclass(frozen=True)
class Files:
    """Adapters of two weights; ``path``: where they are served, as they are put there."""

    kinds: Path
    path: Path

    def put(self, kind: str) -> None:
        for file in (self.kinds / kind).iterdir():
            self.path.mkdir(exist_ok=True)
            shutil.copyfile(file, self.path / file.name)


@pytest.fixture
def files(kinds: Path, tmp_path: Path) -> Files:
    found = Files(kinds, tmp_path / "served")
    found.put(OLD)
    return found


@pytest.fixture(scope="module")
def expected(
    module_engine: EngineFactory, one_layer_model: Path, kinds: Path
) -> dict[str, tuple[Answer, Answer]]:
    """Cold answers of an engine that knows each adapter under a path of its own: composed, and ordinary."""
    found = {}
    with module_engine(one_layer_model, **ARGS) as engine:
        for kind in (OLD, NEW):
            composed, plain = engine.call(answers, Adapter(str(kinds / kind), name=kind), ASK, ASK.plain())
            assert composed.tokens == plain.tokens and composed.cached == 0
            found[kind] = composed, plain
    assert found[OLD][0].tokens != found[NEW][0].tokens
    return found


@pytest.fixture(scope="module", params=["pool", "disk"])
def _engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, one_layer_model: Path, disk: dict[str, Any]
) -> Engine:
    """An engine without tiers, and one with a disk tier."""
    return module_engine(one_layer_model, options=stored(disk) if request.param == "disk" else {}, **ARGS)


@pytest.fixture
def check(expected: dict[str, tuple[Answer, Answer]]) -> Any:
    """Asks twice, and for the ordinary answer; all are those of a cold engine."""

    def asked(engine: Engine, adapter: Adapter, kind: str, reuses: bool = True) -> Answer:
        cold, warm, plain = engine.call(answers, adapter, ASK, ASK, ASK.plain())
        composed, ordinary = expected[kind]
        for found in (cold, warm):
            assert same(found, composed), f"not the answer of the {kind} weights, {found.cached} cached"
        assert same(plain, ordinary), f"the ordinary answer is not that of the {kind} weights"
        assert (warm.cached > 500) == reuses
        return cold

    return asked


@pytest.fixture
def loaded(engine: Engine, files: Files, check: Any) -> Adapter:
    adapter = Adapter(str(files.path))
    engine.call(load, adapter)
    check(engine, adapter, OLD)
    return adapter


WAYS = ["in-place", "in-place-by-requests", "another-id", "removed", "by-requests-alone"]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_loaded_again(engine: Engine, files: Files, check: Any, way: str) -> None:
    adapter = Adapter(str(files.path))
    if way != "by-requests-alone":
        engine.call(load, adapter)
    check(engine, adapter, OLD)
    files.put(NEW)
    match way:
        case "in-place":
            engine.call(load, replace(adapter, in_place=True))
        case "in-place-by-requests":
            adapter = replace(adapter, in_place=True)
        case "another-id":  # what a server does that unloads and loads
            adapter = Adapter(str(files.path))
            engine.call(load, adapter)
        case "removed":
            engine.call(remove, adapter)
            engine.call(load, adapter)
        case "by-requests-alone":
            adapter = Adapter(str(files.path))
    assert check(engine, adapter, NEW).cached == 0
    files.put(OLD)
    engine.call(load, again := replace(adapter, in_place=True))
    check(engine, again, OLD)


def test_weights_that_changed_between_two_starts(
    start_engine: EngineFactory, one_layer_model: Path, tmp_path: Path, files: Files, check: Any
) -> None:
    """Records on disk are found again by what the adapter's files hold, not where it stands."""
    options, adapter = stored(on_disk(tmp_path / "records")), Adapter(str(files.path))
    moved = Adapter(str(files.kinds / OLD), name="moved")
    starts = (adapter, OLD, False), (adapter, NEW, False), (adapter, OLD, True), (moved, OLD, True)
    for asked, kind, cached in starts:
        files.put(kind)
        with start_engine(one_layer_model, options=options, **ARGS) as engine:
            assert (check(engine, asked, kind).cached > 500) == cached


def change_amid(llm: Any, adapter: Adapter, files: Files, kind: str, loads: bool) -> None:
    """Put other weights in place while a request's segment is half computed."""
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    begin(llm, "amid", ASK, lora_request=adapter.request())
    while not half_computed(scheduler):
        engine.step()
    files.put(kind)
    if loads:
        load(llm, replace(adapter, in_place=True))
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("loads", [True, False], ids=["loaded", "read-again"])
def test_a_request_that_is_under_way_leaves_nothing_to_others(
    engine: Engine, files: Files, check: Any, loads: bool
) -> None:
    """Some of its records, and of its blocks in vLLM's cache, are of both weights."""
    adapter = Adapter(str(files.path), in_place=not loads)
    engine.call(load, adapter)
    engine.call(change_amid, adapter, files, NEW, loads)
    adapter = replace(adapter, in_place=True)
    for kind in (NEW, OLD) if loads else (OLD, NEW):
        files.put(kind)
        engine.call(load, adapter)
        assert check(engine, adapter, kind).cached == 0


def test_files_that_changed_under_a_loaded_adapter(
    engine: Engine, files: Files, check: Any, loaded: Adapter
) -> None:
    """vLLM goes on with the weights that it has, until it gives the adapter's place to another and loads the
    files again, without a word: none of its records are shared."""
    adapter, other = loaded, Adapter(str(files.kinds / NEW), name="other")
    files.put(NEW)
    check(engine, adapter, OLD, reuses=False)
    check(engine, other, NEW)
    found = engine.call(answers, adapter, ASK, ASK)
    (expected,) = engine.call(answers, other, ASK)
    assert all(same(one, expected) and not one.cached for one in found), "vLLM has loaded it again"
    files.put(OLD)
    engine.call(load, replace(adapter, in_place=True))
    check(engine, adapter, OLD)


def test_loading_that_fails(engine: Engine, files: Files, check: Any, loaded: Adapter) -> None:
    """vLLM has the former weights still."""
    (files.path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(EngineError) as raised:
        engine.call(load, replace(loaded, in_place=True))
    assert raised.value.kind != "AssertionError"
    check(engine, loaded, OLD, reuses=False)
    files.put(NEW)
    engine.call(load, replace(loaded, in_place=True))
    check(engine, loaded, NEW)


def test_files_that_are_gone_change_nothing(
    engine: Engine, files: Files, check: Any, loaded: Adapter
) -> None:
    shutil.rmtree(files.path)
    assert check(engine, loaded, OLD).cached > 500


def test_files_that_cannot_be_read(engine: Engine, files: Files, check: Any) -> None:
    """Requests share no records while the adapter's files cannot be read."""
    (files.path / "adapter_model.bin").mkdir()  # vLLM takes the file of safetensors
    adapter = Adapter(str(files.path))
    engine.call(load, adapter)
    check(engine, adapter, OLD, reuses=False)
    (files.path / "adapter_model.bin").rmdir()
    engine.call(load, again := replace(adapter, in_place=True))
    assert check(engine, again, OLD).cached == 0


def test_no_event_names_blocks_of_weights_that_replaced_others(
    start_engine: EngineFactory, one_layer_model: Path, files: Files
) -> None:
    """The salt of these blocks holds a secret of the engine."""
    with start_engine(one_layer_model, **ARGS | EVENTS) as engine:
        adapter = Adapter(str(files.path))
        engine.call(answers, adapter, ASK.plain())
        files.put(NEW)
        engine.call(load, again := replace(adapter, in_place=True))
        engine.call(answers, again, ASK.plain())
        engine.ask(Ask(tuple(LAST)))
        events, leaked = engine.call(published, LAST)
    assert not leaked and [event["lora_name"] for event in events].count(adapter.name) == 1


def test_two_adapters_under_one_id(engine: Engine, files: Files, check: Any) -> None:
    """Several API servers count ids each for itself, and vLLM takes what it has loaded under the id."""
    one, other = Adapter(str(files.path)), Adapter(str(files.kinds / NEW))
    confused = replace(other, id=one.id, name="confused")
    check(engine, one, OLD)
    cold, warm = engine.call(answers, confused, ASK, ASK)
    assert not cold.cached and not warm.cached
    check(engine, other, NEW)
    engine.call(answers, confused, ASK)
    engine.call(answers, one, ASK)
    check(engine, Adapter(str(files.path), name="anew"), OLD)
    check(engine, Adapter(str(files.kinds / NEW), name="anew"), NEW)
