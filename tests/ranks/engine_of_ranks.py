"""``engine_of_ranks.py MODEL ENGINE PROMPTS OPTIONS``: prints, as JSON, what an engine on the CPU with these
arguments of vLLM and options of the plugin answers.

To an ordinary prompt; to composed prompts, all cold, then all warm; to others, cold, all at once.  And how
often each rank's operators ran for the first two.  With ``null`` for OPTIONS it is a stock engine, and
answers the ordinary prompt.
"""

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


def logprobs(answer: Any) -> list[float]:
    """Of the tokens of an answer."""
    chosen = answer.outputs[0]
    return [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]


def main(model: str, engine: dict[str, Any], prompts: int, options: dict[str, Any] | None) -> None:
    from vllm import LLM, SamplingParams

    ours = {"attention_backend": "hypic", "additional_config": {"hypic": options}}
    usual = {"enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 128}
    llm = LLM(model=model, **usual | ({} if options is None else ours) | engine)
    rng, sampling = random.Random(0), SamplingParams(max_tokens=8, temperature=0, logprobs=0)

    def ask(*asked: list[int]) -> dict[str, Any]:
        given: list[Any] = [{"prompt_token_ids": tokens} for tokens in asked]
        found = llm.generate(given, sampling, use_tqdm=False)
        return {
            "tokens": [list(a.outputs[0].token_ids) for a in found],
            "logprobs": [logprobs(a) for a in found],
            "cached": [a.num_cached_tokens for a in found],
        }

    said = {"plain": ask([t for t in prompt(rng) if t != SEPARATOR])}
    if options is not None:
        asked = [prompt(rng) for _ in range(prompts)]
        answers = [ask(one) for one in 2 * asked]
        said |= {name: [a[name][0] for a in answers] for name in answers[0]}
        said["calls"] = llm.collective_rpc("hypic_calls")
        # So that several batches are on their way at once.
        said["together"] = ask(*(prompt(rng) for _ in range(4)))
    print("FOUND", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
