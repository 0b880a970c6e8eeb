"""LLM.generate over documents in any order.

python examples/offline.py
"""

from demo_data import ANSWER, DOCUMENTS, MODEL, PREFIX, QUESTION, SYSTEM
from vllm import LLM, SamplingParams

from vllm_hypic.primitives.builder import build_prompt


def main():
    # The backend's name switches everything on.
    # A fixed size of vLLM's KV cache: on CPUs it would take 92 % of the memory.
    llm = LLM(
        MODEL, attention_backend="hypic", enforce_eager=True, max_model_len=4096, kv_cache_memory_bytes=2**30
    )
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for documents in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[4:] + DOCUMENTS[:4]):
        # SYSTEM<|hypic_sep|>document<|hypic_sep|>document ... <|hypic_sep|>QUESTION
        prompt = build_prompt(system=PREFIX + SYSTEM, segments=documents, query=QUESTION)
        [output] = llm.generate(prompt, greedy, use_tqdm=False)
        print(
            f"answer:{output.outputs[0].text} (expected: {ANSWER}), reused tokens: {output.num_cached_tokens}"
        )


if __name__ == "__main__":
    main()
