"""A client of the OpenAI-compatible server, with per-request options.

vllm serve examples/models/tiny-hybrid-qa/model --attention-backend hypic \
    --enforce-eager --max-model-len 4096 --kv-cache-memory-bytes 1G --enable-prompt-tokens-details
python examples/client.py http://127.0.0.1:8000
"""

import sys

import httpx
from demo_data import ANSWER, DOCUMENTS, PREFIX, QUESTION, SYSTEM

from vllm_hypic.primitives.builder import build_prompt


def complete(url, documents, options):
    prompt = build_prompt(system=PREFIX + SYSTEM, segments=documents, query=QUESTION)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "vllm_xargs": options}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    reused = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    text = answer["choices"][0]["text"]
    print(f"{options or 'default'}: answer:{text} (expected: {ANSWER}), reused tokens: {reused}")


def main(url="http://127.0.0.1:8000"):
    # A prompt that ends in a separator only computes its documents, for requests to come.
    warm_up = build_prompt(segments=DOCUMENTS)
    httpx.post(f"{url}/v1/completions", json={"prompt": warm_up}, timeout=300).raise_for_status()
    complete(url, DOCUMENTS, {})
    complete(url, DOCUMENTS[::-1], {})
    # Recompute 4 tokens on either side of a boundary, not 8. Another seam is another record.
    complete(url, DOCUMENTS, {"hypic_link": "hypic", "hypic_seam_tokens": 4})
    # EPIC: recompute the first 8 tokens of every document and none at its end.
    complete(url, DOCUMENTS, {"hypic_link": "epic-8"})
    # Compute the whole prompt, as stock vLLM does.
    complete(url, DOCUMENTS, {"hypic_link": "full"})


if __name__ == "__main__":
    main(*sys.argv[1:])
