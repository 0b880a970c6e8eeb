"""Documents compiled once, named by their ids in later requests, with a time to live.

VLLM_PLUGINS=hypic,hypic_cache vllm serve examples/models/tiny-hybrid-qa/model --attention-backend hypic \
    --enforce-eager --max-model-len 4096 --kv-cache-memory-bytes 1G --enable-prompt-tokens-details
python examples/cached_documents.py http://127.0.0.1:8000
"""

import sys

import httpx
from demo_data import ANSWER, DOCUMENTS, PREFIX, QUESTION, SYSTEM

from vllm_hypic.cache_api.client import SegmentCache


def ask(url, documents):
    prompt = PREFIX + SYSTEM + "".join(document.form for document in documents) + QUESTION
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    reused = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    print(f"answer:{answer['choices'][0]['text']} (expected: {ANSWER}), reused tokens: {reused}")


def main(url="http://127.0.0.1:8000"):
    with SegmentCache(url) as cache:
        documents = [cache.compile(text, ttl_s=600) for text in DOCUMENTS]
        print(f"{documents[0].form} stands for {documents[0].tokens} tokens")
        ask(url, documents)
        ask(url, documents[::-1])
        for document in documents:
            cache.delete(document.id)


if __name__ == "__main__":
    main(*sys.argv[1:])
