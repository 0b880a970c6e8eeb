"""``offline_program.py MODEL ENGINE LENGTH``: an offline program as users write it.

With ENGINE as JSON for vLLM's arguments.  LENGTH: tokens of the prompts that are asked for ever; 0: none are.
"""

import json
import random
import sys
import time

print("[program] imports", flush=True)

from vllm import LLM, SamplingParams  # noqa: E402  the line above is about this import

SEPARATOR = 496
"""Id of the primitive on the demo model."""

if __name__ == "__main__":
    model, engine, length = sys.argv[1:]
    llm = LLM(model=model, **json.loads(engine))
    print("[program] has an engine", flush=True)
    rng = random.Random(0)
    while int(length):
        segments = [
            [rng.randrange(4, 480) for _ in range(256)] + [SEPARATOR] for _ in range(int(length) // 257)
        ]
        prompt = {"prompt_token_ids": [token for segment in segments for token in segment] + [5]}
        llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
        print("[program] has an answer", flush=True)
    time.sleep(600)
