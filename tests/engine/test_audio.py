"""Audio in prompts with segments: what ``test_media.py`` shows of all media is shown there.

As in ``test_images.py`` the models have one layer of attention, behind which composing is exact.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import EngineFactory, Saver
from .engines import EngineError, entry_of, run_apart, sampling_params
from .test_images import ENGINE, FIRST, LEAD, QUERY, QWEN2, SECOND, Model, ask, picture, video
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
SEEN = {"image": [picture(0, 64, 160)], "video": [video(2, 4, 64, 96)]}
MIXED = {
    "mixed": ask(ALL_KINDS, SECOND, query=[*SOUND, *QUERY], audio=[LONG, SHORT], **SEEN),
    "mixed-reordered": ask(SECOND, ALL_KINDS, query=QUERY, audio=[LONG], **SEEN),
}

BOUND = 1e-4
"""As in ``test_images.py``, in float32."""
ARGS = ENGINE | {"dtype": "float32", "limit_mm_per_prompt": {"audio": LIMIT}}
HEARS: dict[str, Any] = {"steps": 8, "differs": 100, "write": save_audio}
HEARS |= {"other": {"audio": [sound(7, 6.2), SHORT]}}
FIELDS = {"num_hidden_layers": 1, "hidden_size": 256}
MODELS = [
    Model("qwen2-audio", "Qwen2Audio", FIELDS, BOUND, ARGS, asks=ASKS, **HEARS),
    # Three-dimensional positions, alike in all dimensions for audio.
    Model("qwen2.5-omni", "Qwen2_5Omni", QWEN2, BOUND, ARGS, asks=ASKS | MIXED, **HEARS),
]


def test_what_vllm_refuses_is_refused(start_engine: EngineFactory, saved: Saver) -> None:
    """In vLLM's words, for ordinary requests and for those with segments; the engine goes on."""
    engine, whole = start_engine(saved(MODELS[0].save), **ARGS), sound(0, 30)
    [before] = engine.ask(ASKS["segment"])  # vLLM sends no audio twice to its core, whether refused or not
    many, short = LIMIT + 1, (whole[0][:100], RATE)
    for given, why in (
        (ask(*[SOUND] * many, query=QUERY, audio=[SHORT] * many), f"At most {LIMIT} audio"),
        (
            ask(*[SOUND] * LIMIT, query=QUERY, lead=60 * LEAD, audio=[whole] * LIMIT),
            "maximum (model|context) length",
        ),
        (ask(SOUND, query=QUERY, audio=[short]), "too short to be represented"),
    ):
        for one in (given.plain(), given):
            with pytest.raises(EngineError, match=why):
                engine.ask(one)
    [after] = engine.ask(ASKS["segment"])
    assert after.tokens == before.tokens


def test_audio_in_a_video_is_refused(start_engine: EngineFactory, saved: Saver) -> None:
    """Its tokens and the video's stand in one another; without segments the engine answers."""
    engine = start_engine(saved(MODELS[1].save), **ARGS)
    assert len(engine.call(generate_interleaved, False)) == 8
    with pytest.raises(EngineError, match="lies inside the preceding input, as with use_audio_in_video"):
        engine.call(generate_interleaved, True)


def generate_interleaved(llm: Any, composed: bool) -> list[int]:
    given = ask(VIDEO, FIRST, query=QUERY, audio=[SHORT], video=[video(2, 4, 64, 96)])
    given = given if composed else given.plain()
    interleaved = entry_of(given) | {"mm_processor_kwargs": {"use_audio_in_video": True}}
    [output] = llm.generate([interleaved], sampling_params(given), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_positions_that_want_a_token_behind_are_refused(tmp_path: Path, engine_logs: Path) -> None:
    """A segment may end with its audio, and the worker asks the same rule."""
    log = engine_logs / "models.log"
    for kind in ("Qwen3ASR", "Qwen3OmniMoe"):
        (tmp_path / kind).mkdir()
    assert run_apart(offsets_of_audio, tmp_path / "Qwen3ASR", "Qwen3ASR", log=log) is None
    with pytest.raises(EngineError, match="needs a token behind audio inputs, where a segment may end"):
        run_apart(offsets_of_audio, tmp_path / "Qwen3OmniMoe", "Qwen3OmniMoe", log=log)


def offsets_of_audio(path: Path, kind: str) -> tuple[int, ...] | None:
    """Of its tokens in time, by the rule of vLLM's class; ``None``: one after the other."""
    import torch
    import transformers
    from vllm.config import ModelConfig
    from vllm.multimodal import inputs
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
    frames = inputs.MultiModalFieldElem(torch.tensor(100), inputs.MultiModalBatchedField())
    data = inputs.MultiModalKwargsItem({"audio_feature_lengths": frames})
    audio = inputs.MultiModalFeatureSpec(data, "audio", "a", inputs.PlaceholderRange(1, 13))
    [found] = MediaReader(model).of([audio], [0] * 20)
    return found.offsets
