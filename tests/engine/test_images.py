"""Images in prompts with segments: what ``test_media.py`` shows of all media is shown there.

Behind one layer of attention alone composing is exact: K and V of every token depend on its embedding and on
where the model sees it.  So it is behind one linear layer.  Ordinary requests of the same engine are then the
yardstick, and stock vLLM is theirs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib.oracle.vision import VisionOracle
from PIL import Image

from .conftest import EngineFactory, Saver, checked
from .engines import Answer, Ask, Engine, EngineError, entry_of, prompt
from .test_vision_text import DELTA_NET, FIRST, LEAD, QUERY, SECOND
from .tiny_vision import END_ID, IMAGE_ID, START_ID, VIDEO_ID, save_vision

PICTURE, VIDEO = [START_ID, IMAGE_ID, END_ID], [START_ID, VIDEO_ID, END_ID]
DOCUMENT = [*FIRST[:60], *PICTURE, *FIRST[60:]]


def picture(seed: int, height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def video(seed: int, frames: int, height: int, width: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Two frames a second."""
    known = {"fps": 2.0, "duration": frames / 2, "total_num_frames": frames, "do_sample_frames": False}
    known |= {"frames_indices": list(range(frames)), "video_backend": "opencv"}
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), np.uint8), known


WIDE, TALL = picture(0, 64, 160), picture(1, 196, 96)


def ask(*segments: list[int], query: list[int], lead: list[int] = LEAD, **media: list[Any]) -> Ask:
    return Ask(prompt(*segments, lead=lead, query=query), sampling={"logprobs": -1}, media=dict(media))


ASKS = {
    "lead-and-query": ask(
        FIRST, SECOND, lead=[*LEAD, *PICTURE], query=[*PICTURE, *QUERY], image=[WIDE, TALL]
    ),
    "segment": ask(DOCUMENT, SECOND, query=[*PICTURE, *QUERY], image=[TALL, WIDE]),
    "reordered": ask(SECOND, DOCUMENT, query=QUERY, image=[TALL]),
    "alone": ask(PICTURE, FIRST, query=QUERY, image=[TALL]),
    "two-of-one": ask(DOCUMENT, [*SECOND, *PICTURE], query=QUERY, image=[TALL, TALL]),
}
MOVING = ask([*DOCUMENT, *VIDEO], SECOND, query=QUERY, image=[TALL], video=[video(2, 4, 64, 96)])


@dataclass(frozen=True)
class Model:
    """``bound``: on logprobs of the whole vocabulary, a thousandth of what a wrong position is worth in
    float32, and elsewhere that of ``families``' gated delta net; ``steps``: answers that are compared."""

    name: str
    kind: str
    fields: dict[str, Any]
    bound: float
    args: dict[str, Any]
    steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    write: Callable[..., object] = save_vision
    asks: dict[str, Ask] = field(default_factory=lambda: ASKS)
    differs: int = 6
    """Times the bound that other media are apart, at least."""
    moving: Ask | None = None
    """With a video."""
    other: dict[str, list[Any]] = field(default_factory=lambda: OTHER)
    """Media of the request "segment", of which the document's are others of the same size."""

    def __str__(self) -> str:
        return self.name

    def save(self, path: Path) -> None:
        self.write(path, self.kind, self.fields, **self.options)


ORACLE_BOUND = 2e-3
"""On logprobs of the whole vocabulary, in float32."""
ENGINE: dict[str, Any] = {"max_logprobs": -1, "enable_prefix_caching": False, "max_num_batched_tokens": 128}
"""Prefill chunks end inside images."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
QWEN2 = {"num_hidden_layers": 1, "hidden_size": 256, "rope_parameters": MROPE}
OTHER = {"image": [picture(7, *TALL.size[::-1]), WIDE]}
IN_FLOAT32, IN_BFLOAT16 = (ENGINE | {"dtype": dtype} for dtype in ("float32", "bfloat16"))
SILENT = [
    {"norm_center": 0.0, "silent": (part,)}
    for part in ("layers.0.linear_attn.out_proj", "layers.1.self_attn.o_proj")
]
MODELS = [
    Model("qwen2-vl", "Qwen2VL", QWEN2, 1e-4, IN_FLOAT32, steps=8, moving=MOVING),
    Model("qwen3.5-attention", "Qwen3_5", DELTA_NET, 0.15, IN_BFLOAT16, options=SILENT[0], moving=MOVING),
    Model("qwen3.5-linear", "Qwen3_5", DELTA_NET, 0.15, IN_BFLOAT16, options=SILENT[1]),
]


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, saved: Saver) -> Iterator[Engine]:
    """Of the first model."""
    yield from checked(module_engine(saved(MODELS[0].save), **MODELS[0].args))


def farthest(one: Answer, other: Answer, steps: int) -> float:
    """Largest difference of a logprob in the first ``steps`` answers, whose tokens are the same."""
    assert one.tokens[: steps - 1] == other.tokens[: steps - 1]
    pairs = zip(one.logprobs[0][:steps], other.logprobs[0][:steps], strict=True)
    return max(abs(a[t] - b[t]) for a, b in pairs for t in a)


def prompt_tokens(llm: Any, given: Ask) -> int:
    """Of the logical prompt, with those that stand for images."""
    [output] = llm.generate([entry_of(given.plain())])
    return len(output.prompt_token_ids)


def test_a_position_too_many_is_seen(engine: Engine) -> None:
    """Were tokens behind an image to count its tokens, or its own to be rotated alike, the bound would be
    broken by a factor of a thousand."""
    given = ASKS["segment"]
    [plain] = engine.ask(given.plain())
    engine.reset()
    engine.call(count, "tokens")
    [wrong] = engine.ask(given)
    engine.call(count, "positions")
    engine.reset()
    assert farthest(wrong, plain, 1) > 1000 * MODELS[0].bound


def count(llm: Any, what: str) -> None:
    from vllm_hypic.connector.scheduler import worker_view as view

    if what == "tokens":
        view.hypic_right, view.rotary = view.rotary, lambda positions, media: list(positions)
    else:
        view.rotary = view.hypic_right


def test_named_segments(engine: Engine) -> None:
    """By indices of the prompt with the tokens that stand for images; none is cut."""
    given = ask(query=[*DOCUMENT, *SECOND, *QUERY], image=[TALL]).plain()
    [plain] = engine.ask(given)
    end = engine.call(prompt_tokens, given) - len(QUERY)
    begin, second = len(LEAD), end - len(SECOND)
    named = replace(given, extra={"hypic_segment_ranges": [begin, second, second, end]})
    cold, warm = engine.ask_one_by_one(named, named)
    assert farthest(cold, plain, MODELS[0].steps) <= MODELS[0].bound
    assert warm.cached == end - 2 * 16
    cut = replace(given, extra={"hypic_segment_ranges": [begin, begin + 70, second, end]})
    with pytest.raises(EngineError, match="are one image, video or audio: no segment may begin or end"):
        engine.ask(cut)


def test_two_layers_agree_with_the_oracle(start_engine: EngineFactory, saved: Saver) -> None:
    """What a record's second layer has seen is what it should have: the segment and its image, alone."""
    path = saved(save_vision, "Qwen2VL", QWEN2 | {"num_hidden_layers": 2})
    oracle = VisionOracle(path)
    lead, query, shown = [*LEAD, *PICTURE], [*PICTURE, *QUERY], [WIDE, TALL, WIDE]
    with start_engine(path, dtype="float32", max_logprobs=-1) as engine:
        for segments in ([DOCUMENT, SECOND], [SECOND, DOCUMENT]):
            given = ask(*segments, lead=lead, query=query, image=shown)
            for one, whole in ((given, False), (given.plain(), True)):
                [answer] = engine.ask(one)
                expected = oracle.next_token_logprobs(lead, segments, query, shown, whole=whole)
                found = max(abs(answer.first[t] - float(p)) for t, p in enumerate(expected))
                assert found <= ORACLE_BOUND, f"{segments[0] is SECOND} {whole}: {found:.1e}"
            link = oracle.next_token_logprobs(lead, segments, query, shown) - expected
            assert float(link.abs().max()) > 10 * ORACLE_BOUND, "the link's own difference goes unseen"


BY_MODEL = "image inputs are not supported by this model:"
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    (
        {"modality": "vision_chunk"},
        "vision_chunk inputs are not supported: expected image, video or audio inputs",
    ),
    (
        {"mm_processor_cache_gb": 0},
        "image inputs need hashes, which vLLM computes for its caches only: "
        "expected --enable-prefix-caching, or --mm-processor-cache-gb above 0",
    ),
    (
        {"mm_processor_cache_type": "shm"},
        "image inputs are not supported with --mm-processor-cache-type shm, "
        "which hides the size of images from the scheduler: expected lru",
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        f"{BY_MODEL} its windows count tokens, but its three-dimensional positions (M-RoPE) do not",
    ),
    ({"is_mm_prefix_lm": True}, f"{BY_MODEL} its images attend to later tokens"),
]
"""What another request or engine would be, and what its front end would say."""


def test_refused(engine: Engine) -> None:
    for changed, said in REFUSED:
        assert engine.call(refusal, changed) == said


def refusal(llm: Any, changed: dict[str, Any]) -> str | None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from vllm_hypic.engine.media import refused_media

    config = llm.llm_engine.vllm_config
    model, changed = config.model_config, dict(changed)
    media = MultiModalFeatureSpec(None, changed.pop("modality", "image"), "x", PlaceholderRange(0, 4))
    parts = (model.multimodal_config, model, model.hf_text_config)
    with ExitStack() as changes:
        for name, value in changed.items():
            part = next(part for part in parts if hasattr(part, name))
            changes.callback(object.__setattr__, part, name, getattr(part, name))
            object.__setattr__(part, name, value)
        return refused_media([media], config)


TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %} <|vision_start|><|image_pad|><|vision_end|> {% endif %}{% endfor %}{% endfor %}"
)


def test_chat(engine: Engine) -> None:
    """A chat whose documents are texts and an image, between separators."""
    engine.reset()
    texts = [" ".join(f"w{i}" for i in piece) for piece in (LEAD, FIRST, SECOND, QUERY)]
    plain, cold, warm = engine.call(chat, texts, WIDE)
    assert cold[:2] == warm[:2] and warm[2] > cold[2] == 0
    assert cold[0] == plain[0]
    assert max(abs(a - b) for a, b in zip(cold[1], plain[1], strict=True)) <= MODELS[0].bound


def chat(llm: Any, texts: list[str], image: Image.Image) -> list[tuple[tuple[int, ...], list[float], int]]:
    """Answer, its logprobs, and tokens from records: without separators, and twice with them."""
    from vllm import SamplingParams

    sep = llm.get_tokenizer().prompt_texts.sep
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    found = []
    form = {"chat_template": TEMPLATE, "chat_template_content_format": "openai"}
    for mark in (" ", sep, sep):
        lead, first, second, query = texts
        content = [
            {"type": "text", "text": f"{lead}{mark}{first}"},
            {"type": "image_pil", "image_pil": image},
            {"type": "text", "text": f"{mark}{second}{mark}{query}"},
        ]
        [output] = llm.chat([{"role": "user", "content": content}], params, **form, use_tqdm=False)
        sample = output.outputs[0]
        logprobs = [at[t].logprob for t, at in zip(sample.token_ids, sample.logprobs, strict=True)]
        found.append((tuple(sample.token_ids), logprobs, output.num_cached_tokens or 0))
    return found
