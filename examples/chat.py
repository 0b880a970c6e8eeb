"""LLM.chat: documents and question stand in one user message, separators between them.

python examples/chat.py
"""

from demo_data import ANSWER, CHAT_TEMPLATE, DOCUMENTS, MODEL, QUESTION, SYSTEM
from vllm import LLM, SamplingParams

from vllm_hypic.primitives.builder import build_messages


def main():
    # A fixed size of vLLM's KV cache: on CPUs it would take 92 % of the memory.
    llm = LLM(
        MODEL, attention_backend="hypic", enforce_eager=True, max_model_len=4096, kv_cache_memory_bytes=2**30
    )
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        messages = build_messages(system=SYSTEM, documents=documents, question=QUESTION)
        [output] = llm.chat(messages, greedy, chat_template=CHAT_TEMPLATE, use_tqdm=False)
        print(
            f"answer:{output.outputs[0].text} (expected: {ANSWER}), reused tokens: {output.num_cached_tokens}"
        )


if __name__ == "__main__":
    main()
