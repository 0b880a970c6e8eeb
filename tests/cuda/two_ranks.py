"""``python two_ranks.py MODEL RANKS``: prints, as JSON, what an engine of so many ranks on the CPU answers to
one composed prompt, cold and warm, and how often each rank's operators ran."""

from __future__ import annotations

import json
import random
import sys

SEPARATOR = 496
"""Id of the primitive on models of ``random_models``."""


def main(model: str, ranks: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        attention_backend="hypic",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=128,
    )
    rng = random.Random(0)
    tokens: list[int] = []
    for length in (50, 140, 210, 19):
        tokens += [rng.randrange(4, 480) for _ in range(length)] + [SEPARATOR]
    prompt = {"prompt_token_ids": tokens[:-1]}
    sampling = SamplingParams(max_tokens=8, temperature=0)
    answers = [llm.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2)]  # type: ignore[list-item]
    found = {
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "cached": [a.num_cached_tokens for a in answers],
        "calls": llm.collective_rpc("hypic_calls"),
    }
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
