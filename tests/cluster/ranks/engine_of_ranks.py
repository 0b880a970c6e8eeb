"""``engine_of_ranks.py MODEL ENGINE ASKED OPTIONS``: prints, as JSON, what an engine on the CPU with these
arguments of vLLM and options of the plugin answers, and how many tokens were cached.

``ASKED`` is a number: an ordinary prompt; so many composed prompts, all cold, then all warm; others, cold,
all at once; and how often each rank's operators ran for the first two.  With ``null`` for OPTIONS it is a
stock engine, and answers the ordinary prompt.

``ASKED`` is a list: turns of a fixed conversation, each asked with all before it.
"""

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

SEPARATOR = 496
"""Id of the primitive on models of ``random_models``."""


def parts(rng: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(4, 480) for _ in range(length)] for length in lengths]


def prompt(rng: random.Random) -> list[int]:
    return [t for part in parts(rng, (50, 140, 210, 19)) for t in (*part, SEPARATOR)][:-1]


def logprobs(answer: Any) -> list[float]:
    """Of the tokens of an answer."""
    chosen = answer.outputs[0]
    return [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]


def main(model: str, engine: dict[str, Any], asked: int | list[int], options: dict[str, Any] | None) -> None:
    from vllm import LLM, SamplingParams

    usual: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024}
    if options is not None:
        usual |= {"attention_backend": "hypic", "additional_config": {"hypic": options}}
    if isinstance(asked, int):
        usual["max_num_batched_tokens"] = 128
    llm = LLM(model=model, **usual | engine)
    rng, sampling = random.Random(0), SamplingParams(max_tokens=8, temperature=0, logprobs=0)

    def ask(*prompts: list[int]) -> dict[str, Any]:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return {
            "tokens": [list(a.outputs[0].token_ids) for a in found],
            "logprobs": [logprobs(a) for a in found],
            "cached": [a.num_cached_tokens for a in found],
        }

    def one_by_one(prompts: list[list[int]]) -> dict[str, Any]:
        answers = [ask(one) for one in prompts]
        return {name: [a[name][0] for a in answers] for name in answers[0]}

    if isinstance(asked, list):
        conversation = parts(rng, (200, 90, 120))
        said = one_by_one([[t for part in conversation[: turn + 1] for t in part] for turn in asked])
    else:
        said = {"plain": ask([t for t in prompt(rng) if t != SEPARATOR])}
        if options is not None:
            said |= one_by_one(2 * [prompt(rng) for _ in range(asked)])
            said["calls"] = llm.collective_rpc("hypic_calls")
            # So that several batches are on their way at once.
            said["together"] = ask(*(prompt(rng) for _ in range(4)))
    print("FOUND", json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
