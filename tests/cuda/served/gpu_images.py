"""Serves a model that sees, or hears, through the GPU model runner's code on the CPU, as ``gpu_runner`` a
hybrid one.

    TRITON_INTERPRET=1 python gpu_images.py MODEL FOLDER [FAULT]

Prints as JSON, by prompt, logprobs of the first token by id: of the ordinary request, and composed, cold and
warm; and how many tokens were cached when it was warm.
"""

import json
import sys
from pathlib import Path

import gpu_runner

sys.path.extend(str(Path(__file__).parents[level]) for level in (2, 3))

from engine import test_audio, test_images
from engine.engines import Ask
from engine.test_images import ENGINE, MOVING, QWEN2
from engine.tiny_audio import save_audio
from engine.tiny_vision import save_vision
from vllm import LLM, SamplingParams

NAMES = ("lead-and-query", "segment", "reordered")
QWEN2_AUDIO = test_audio.MODELS[0]


def main() -> None:
    kind, folder, *fault = sys.argv[1:]
    if kind == "qwen2-vl":
        model = save_vision(Path(folder), "Qwen2VL", QWEN2)
        asks = {name: test_images.ASKS[name] for name in NAMES} | {"video": MOVING}
    else:
        model = save_audio(Path(folder), QWEN2_AUDIO.kind, QWEN2_AUDIO.fields)
        asks = {name: test_audio.ASKS[name] for name in NAMES}
    gpu_runner.pretend(*fault)
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=False,
        max_model_len=1024,
        max_num_seqs=4,
        seed=0,
        attention_backend="hypic",
        additional_config={"hypic": {"page_tokens": 32, "pool_bytes": 16 << 20, "islands": "none"}},
        **ENGINE,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1, ignore_eos=True, detokenize=False)

    def first(asked: Ask) -> tuple[list[float], int]:
        given = {"prompt_token_ids": list(asked.tokens), "multi_modal_data": asked.media}
        [output] = llm.generate([given], sampling, use_tqdm=False)
        logprobs = [one.logprob for _, one in sorted(output.outputs[0].logprobs[0].items())]
        return logprobs, output.num_cached_tokens

    found = {}
    for name, asked in asks.items():
        (plain, _), (cold, _), (warm, cached) = first(asked.plain()), first(asked), first(asked)
        found[name] = [plain, cold, warm, cached]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
