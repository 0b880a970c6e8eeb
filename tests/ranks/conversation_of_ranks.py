"""``conversation_of_ranks.py MODEL ENGINE TURNS OPTIONS``: prints, as JSON, what an engine answers to turns
of a conversation, and how many of their tokens were cached.

``TURNS``: those of a fixed conversation that are asked, in turn, each with all before it.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

LENGTHS = (200, 90, 120)


def main(model: str, engine: dict[str, Any], turns: list[int], options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    usual = {"enforce_eager": True, "max_model_len": 1024, "attention_backend": "hypic"}
    llm = LLM(model=model, **usual | engine, additional_config={"hypic": options})
    rng = random.Random(0)
    parts = [[rng.randrange(4, 480) for _ in range(length)] for length in LENGTHS]
    asked: list[Any] = [
        {"prompt_token_ids": [t for part in parts[: turn + 1] for t in part]} for turn in turns
    ]
    sampling = SamplingParams(max_tokens=8, temperature=0)
    found = [llm.generate([one], sampling, use_tqdm=False)[0] for one in asked]
    said = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in found],
        "cached": [answer.num_cached_tokens for answer in found],
    }
    print("FOUND", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
