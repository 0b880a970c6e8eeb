"""``python two_ranks.py MODEL RANKS PROMPTS DTYPE OPTIONS``: prints, as JSON, what an engine of so many ranks
on the CPU, with these options of the plugin, answers to composed prompts, all of them cold, then all of them
warm, and how often each rank's operators ran."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

SEPARATOR = 496
"""Id of the primitive on models of ``random_models``."""


def prompt(rng: random.Random) -> list[int]:
    tokens: list[int] = []
    for length in (50, 140, 210, 19):
        tokens += [rng.randrange(4, 480) for _ in range(length)] + [SEPARATOR]
    return tokens[:-1]


def main(model: str, ranks: int, prompts: int, dtype: str, options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        attention_backend="hypic",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=128,
        additional_config={"hypic": options},
    )
    rng = random.Random(0)
    asked: list[Any] = [{"prompt_token_ids": prompt(rng)} for _ in range(prompts)]
    sampling = SamplingParams(max_tokens=8, temperature=0)
    answers = [llm.generate([one], sampling, use_tqdm=False)[0] for one in 2 * asked]
    found = {
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
        "cached": [a.num_cached_tokens for a in answers],
        "calls": llm.collective_rpc("hypic_calls"),
    }
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
