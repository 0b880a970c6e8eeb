"""AsyncLLM: stream several requests over the same documents at once.

Documents that two requests need at the same time are computed once.

python examples/async_llm.py
"""

import asyncio

from demo_data import ANSWER, DOCUMENTS, MODEL, PREFIX, QUESTION, SYSTEM
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_hypic.primitives.builder import build_prompt


async def stream(engine, name, documents):
    prompt = build_prompt(system=PREFIX + SYSTEM, segments=documents, query=QUESTION)
    # DELTA: every output holds what is new since the one before.
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(prompt, params, request_id=name):
        text += output.outputs[0].text
        print(f"{name}: {output.outputs[0].text!r}")
    return text


async def main():
    # A fixed size of vLLM's KV cache: on CPUs it would take 92 % of the memory.
    args = AsyncEngineArgs(
        MODEL, attention_backend="hypic", enforce_eager=True, max_model_len=4096, kv_cache_memory_bytes=2**30
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        texts = await asyncio.gather(
            stream(engine, "first", DOCUMENTS),
            stream(engine, "second", DOCUMENTS[::-1]),
        )
    finally:
        engine.shutdown()
    for text in texts:
        print(f"answer:{text} (expected: {ANSWER})")


if __name__ == "__main__":
    asyncio.run(main())
