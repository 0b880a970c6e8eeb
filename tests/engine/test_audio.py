"""Audio in prompts with segments: in the query, in the leading segment, and in segments at any position.

As in ``test_images.py`` the models have one layer of attention, behind which composing is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import EngineFactory
from .engines import Engine, EngineError, audit, run_apart, same
from .test_images import (
    ENGINE,
    FIRST,
    LEAD,
    QUERY,
    QWEN2,
    SECOND,
    ask,
    farthest,
    picture,
    prompt_tokens,
    video,
)
from .tiny_audio import AUDIO_ID, END_ID, IMAGE_ID, SEEN_END_ID, SEEN_ID, START_ID, VIDEO_ID, save_audio

RATE = 16000
SOUND = [START_ID, AUDIO_ID, END_ID]
PICTURE, VIDEO = [SEEN_ID, IMAGE_ID, SEEN_END_ID], [SEEN_ID, VIDEO_ID, SEEN_END_ID]
DOCUMENT = [*FIRST[:60], *SOUND, *FIRST[60:]]
LIMIT = 3
"""Of audio in a prompt."""


def sound(seed: int, seconds: float) -> tuple[np.ndarray, int]:
    """Noise that is louder and softer every tenth of a second."""
    rng = np.random.default_rng(seed)
    loudness = np.repeat(rng.uniform(0, 1, round(10 * seconds)), RATE // 10)
    return (loudness * rng.normal(size=len(loudness))).astype(np.float32), RATE


LONG, SHORT = sound(0, 6.2), sound(1, 0.7)

ASKS = {
    "lead-and-query": ask(FIRST, SECOND, lead=[*LEAD, *SOUND], query=[*SOUND, *QUERY], audio=[SHORT, LONG]),
    "segment": ask(DOCUMENT, SECOND, query=[*SOUND, *QUERY], audio=[LONG, SHORT]),
    "reordered": ask(SECOND, DOCUMENT, query=QUERY, audio=[LONG]),
    "alone": ask([AUDIO_ID], FIRST, query=QUERY, audio=[LONG]),
    "two-of-one": ask(DOCUMENT, [*SECOND, *SOUND], query=QUERY, audio=[LONG, LONG]),
}
ALL_KINDS = [*FIRST[:30], *PICTURE, *SOUND, *FIRST[30:60], *VIDEO, *FIRST[60:]]
MIXED = {
    "mixed": ask(
        ALL_KINDS,
        SECOND,
        query=[*SOUND, *QUERY],
        image=[picture(0, 64, 160)],
        audio=[LONG, SHORT],
        video=[video(2, 4, 64, 96)],
    )
}
MIXED["mixed-reordered"] = replace(
    ask(SECOND, ALL_KINDS, query=QUERY), media=MIXED["mixed"].media | {"audio": [LONG]}
)


@dataclass(frozen=True)
class Model:
    name: str
    kind: str
    fields: dict[str, Any]
    sees: bool = False

    def __str__(self) -> str:
        return self.name


BOUND, STEPS = 1e-4, 8
"""As in ``test_images.py``, in float32."""
MODELS = [
    Model("qwen2-audio", "Qwen2Audio", {"num_hidden_layers": 1, "hidden_size": 256}),
    # Three-dimensional positions, alike in all dimensions for audio.
    Model("qwen2.5-omni", "Qwen2_5Omni", QWEN2, sees=True),
]
ARGS = ENGINE | {"dtype": "float32", "limit_mm_per_prompt": {"audio": LIMIT}}


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param


@pytest.fixture(scope="module")
def path(model: Model, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    path = tmp_path_factory.mktemp(model.name)
    run_apart(save_audio, path, model.kind, model.fields, log=engine_logs / "models.log")
    return path


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, path: Path) -> Iterator[Engine]:
    with module_engine(path, **ARGS) as started:
        yield started
        left = started.call(audit)
        assert left.clean, left


def test_composed_is_full_recompute(engine: Engine, model: Model) -> None:
    for name, given in (ASKS | (MIXED if model.sees else {})).items():
        [plain] = engine.ask(given.plain())
        for extra in ({}, {"hypic_link": "block"}, {"hypic_context": "lead"}, {"hypic_link": "epic-8"}):
            [composed] = engine.ask(replace(given, extra=extra))
            found = farthest(composed, plain, STEPS)
            assert found <= BOUND, f"{name} {extra}: {found:.1e}"


def test_cold_is_warm(engine: Engine, model: Model) -> None:
    for given in (ASKS | (MIXED if model.sees else {})).values():
        engine.reset()
        cold, warm = engine.ask_one_by_one(given, given)
        assert same(cold, warm) and warm.cached > cold.cached == 0


def test_documents_with_audio_serve_any_order(engine: Engine, model: Model) -> None:
    pairs = [("segment", "reordered"), *([("mixed", "mixed-reordered")] if model.sees else [])]
    for one, other in pairs:
        engine.reset()
        given = (ASKS | MIXED)[other]
        first, second = engine.ask_one_by_one((ASKS | MIXED)[one], given)
        assert first.cached == 0
        tokens = engine.call(prompt_tokens, given)
        assert second.cached == tokens - len(QUERY) - 2 * 16  # all but the seam windows


def test_other_audio_is_another_record(engine: Engine) -> None:
    """Of the same length: placeholders are the same."""
    engine.reset()
    shown = ASKS["segment"]
    [first] = engine.ask(shown)
    [second] = engine.ask(replace(shown, media={"audio": [sound(7, 6.2), SHORT]}))
    assert second.cached == len(LEAD) + len(SECOND) - 16, "the document's record was of other audio"
    assert farthest(second, first, 1) > 100 * BOUND, "the audio goes unheard"


@pytest.mark.parametrize("model", MODELS[:1], ids=str, indirect=True)
def test_plain_and_full_are_stock(engine: Engine, start_engine: EngineFactory, path: Path) -> None:
    """Bit for bit, and a second time, from the encoder's cache."""
    asks = list(ASKS.values())
    with start_engine(path, hypic=False, **ARGS) as stock:
        theirs = stock.ask_one_by_one(*(given.plain() for given in asks))
    ours = engine.ask_one_by_one(*(given.plain() for given in asks))
    full = engine.ask_one_by_one(*(replace(given, extra={"hypic_link": "full"}) for given in asks))
    for a, b, c in zip(theirs, ours, full, strict=True):
        assert same(a, b) and same(a, c)


@pytest.mark.parametrize("model", MODELS[:1], ids=str, indirect=True)
def test_what_vllm_refuses_is_refused(engine: Engine) -> None:
    """In vLLM's words, for ordinary requests and for those with segments; the engine goes on."""
    whole = sound(0, 30)
    too_many = ask(*[SOUND] * (LIMIT + 1), query=QUERY, audio=[SHORT] * (LIMIT + 1))
    too_long = ask(*[SOUND] * LIMIT, query=QUERY, lead=60 * LEAD, audio=[whole] * LIMIT)
    too_short = ask(SOUND, query=QUERY, audio=[(whole[0][:100], RATE)])
    for given, why in (
        (too_many, f"At most {LIMIT} audio"),
        (too_long, "maximum (model|context) length"),
        (too_short, "too short to be represented"),
    ):
        for one in (given.plain(), given):
            with pytest.raises(EngineError, match=why):
                engine.ask(one)
    cut = replace(too_short.plain(), media={"audio": [SHORT]}, extra={"hypic_segments": [0, len(LEAD) + 5]})
    with pytest.raises(EngineError, match="are one image, video or audio, which an edge of a segment cuts"):
        engine.ask(cut)
    [answer] = engine.ask(ASKS["segment"])
    assert len(answer.tokens) == STEPS


@pytest.mark.parametrize("model", MODELS[1:], ids=str, indirect=True)
def test_audio_in_a_video_is_refused(engine: Engine) -> None:
    """Its tokens and the video's stand in one another; without segments the engine answers."""
    assert len(engine.call(generate_interleaved, False)) == 1
    with pytest.raises(EngineError, match="lies in the input before it, as with use_audio_in_video"):
        engine.call(generate_interleaved, True)


def generate_interleaved(llm: Any, composed: bool) -> list[int]:
    from vllm import SamplingParams

    given = ask(VIDEO, FIRST, query=QUERY, audio=[SHORT], video=[video(2, 4, 64, 96)])
    [output] = llm.generate(
        [
            {
                "prompt_token_ids": list((given if composed else given.plain()).tokens),
                "multi_modal_data": given.media,
                "mm_processor_kwargs": {"use_audio_in_video": True},
            }
        ],
        SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return list(output.outputs[0].token_ids)


def test_positions_that_want_a_token_behind_are_refused(tmp_path: Path, engine_logs: Path) -> None:
    """A segment may end with its audio, and the worker asks the same rule."""
    log = engine_logs / "models.log"
    for kind in ("Qwen3ASR", "Qwen3OmniMoe"):
        (tmp_path / kind).mkdir()
    assert run_apart(offsets_of_audio, tmp_path / "Qwen3ASR", "Qwen3ASR", log=log) is None
    with pytest.raises(EngineError, match="wants a token behind an audio, where a segment may end"):
        run_apart(offsets_of_audio, tmp_path / "Qwen3OmniMoe", "Qwen3OmniMoe", log=log)


def offsets_of_audio(path: Path, kind: str) -> tuple[int, ...] | None:
    """Of its tokens in time, by the rule of vLLM's class; ``None``: one after the other."""
    import torch
    import transformers
    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.transformers_utils.configs.qwen3_asr import Qwen3ASRConfig

    from vllm_hypic.engine.media import MediaReader

    rope = QWEN2["rope_parameters"]
    cls = Qwen3ASRConfig if kind == "Qwen3ASR" else getattr(transformers, f"{kind}Config")
    cls(
        thinker_config={"text_config": {"rope_parameters": rope, "rope_scaling": rope}},
        architectures=[f"{kind}ForConditionalGeneration"],
    ).save_pretrained(path)
    model = ModelConfig(str(path), skip_tokenizer_init=True, dtype="bfloat16")
    assert model.uses_mrope
    frames = MultiModalFieldElem(torch.tensor(100), MultiModalBatchedField())
    data = MultiModalKwargsItem({"audio_feature_lengths": frames})
    [found] = MediaReader(model).of(
        [MultiModalFeatureSpec(data, "audio", "a", PlaceholderRange(1, 13))], [0] * 20
    )
    return found.offsets
