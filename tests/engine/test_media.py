"""Images, videos and audio in prompts with segments: in the query, in the leading segment, and in segments at
any position.  Where composing is exact, ordinary requests of the same engine are the yardstick, and stock
vLLM is theirs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from . import test_audio, test_images
from .conftest import EngineFactory, Saver, checked
from .engines import Engine, all_same, same
from .test_images import LEAD, QUERY, SECOND, Model, farthest, prompt_tokens

MODELS = [*test_images.MODELS, *test_audio.MODELS]
FAST = ("qwen2-vl", "qwen3.5-attention", *map(str, test_audio.MODELS))
LINKS = ({}, {"hypic_link": "block"}, {"hypic_context": "lead"}, {"hypic_link": "epic-8"})


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param


@pytest.fixture(scope="module")
def path(model: Model, saved: Saver) -> Path:
    return saved(model.save)


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, path: Path, model: Model) -> Iterator[Engine]:
    yield from checked(module_engine(path, **model.args))


@pytest.mark.fast(*FAST)
def test_composed_is_full_recompute(engine: Engine, model: Model) -> None:
    for name, given in model.asks.items():
        [plain] = engine.ask(given.plain())
        for extra in LINKS:
            found = farthest(engine.ask(replace(given, extra=extra))[0], plain, model.steps)
            assert found <= model.bound, f"{name} {extra}: {found:.1e}"


@pytest.mark.fast(*FAST)
def test_cold_is_warm(engine: Engine, model: Model) -> None:
    for given in model.asks.values():
        engine.reset()
        cold, warm = engine.ask_one_by_one(given, given)
        assert same(cold, warm) and warm.cached > cold.cached == 0


@pytest.mark.fast(*FAST)
def test_documents_serve_any_order(engine: Engine, model: Model) -> None:
    for one, other in (("segment", "reordered"), ("mixed", "mixed-reordered")):
        if one in model.asks:
            engine.reset()
            first, second = engine.ask_one_by_one(model.asks[one], model.asks[other])
            assert first.cached == 0
            documents = engine.call(prompt_tokens, model.asks[other]) - len(QUERY)
            assert second.cached == documents - 2 * 16  # all but the seam windows


@pytest.mark.parametrize("model", [m for m in MODELS if m.name != "qwen3.5-linear"], ids=str, indirect=True)
@pytest.mark.fast("qwen2-vl", *map(str, test_audio.MODELS))
def test_other_media_are_another_record(engine: Engine, model: Model) -> None:
    """Of the same size: placeholders are the same."""
    engine.reset()
    shown = model.asks["segment"]
    [first], [second] = engine.ask(shown), engine.ask(replace(shown, media=model.other))
    assert second.cached == len(LEAD) + len(SECOND) - 16, "the document's record was of other media"
    assert farthest(second, first, 1) > model.differs * model.bound, "the media go unseen or unheard"


@pytest.mark.parametrize("model", [m for m in MODELS if m.moving is not None], ids=str, indirect=True)
@pytest.mark.fast("qwen2-vl")
def test_videos_too(engine: Engine, model: Model) -> None:
    plain, composed = engine.ask_one_by_one(model.moving.plain(), model.moving)
    assert farthest(composed, plain, model.steps) <= model.bound


@pytest.mark.parametrize("model", [test_images.MODELS[0], test_audio.MODELS[0]], ids=str, indirect=True)
def test_plain_and_full_are_stock(
    engine: Engine, start_engine: EngineFactory, path: Path, model: Model
) -> None:
    """Bit for bit, and a second time, from the encoder's cache."""
    plain = [given.plain() for given in model.asks.values()]
    full = [replace(given, extra={"hypic_link": "full"}) for given in model.asks.values()]
    theirs = start_engine(path, hypic=False, **model.args).ask_and_close(*plain)
    assert all_same(theirs, engine.ask_one_by_one(*plain), engine.ask_one_by_one(*full))
