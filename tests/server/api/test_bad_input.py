"""Each bad input gets a clear error or the documented result, and the server goes on serving.

The ``server`` fixture checks after every test that it answers and that nothing is held.
"""

import pytest

from .conftest import DOCUMENT_TOKENS, POOL_SEGMENTS, REUSED, SEAM, cached, outcome, text

SEP, PAD, PDEP = "<|hypic_sep|>", "<|hypic_pad|>", "<|hypic_pdep|>"
SEGMENT = " ".join(f"w{i * i % 96}" for i in range(DOCUMENT_TOKENS))


def option(**options):
    return {"vllm_xargs": {f"hypic_{name}": value for name, value in options.items()}}


REFUSALS = {
    "unknown link method": (option(link="magic"), "hypic_link='magic': expected one of hypic"),
    "the same without separators": ({"prompt": "w1", **option(link="magic")}, "hypic_link='magic'"),
    "link method that is no text": (option(link=7), "hypic_link=7: expected one of"),
    "method the model cannot honour": (option(link="prompt-cache"), "no rule for recurrent"),
    "absurd epic": (option(link="epic-99999"), "expected k <= 1024"),
    "negative seam": (option(seam_tokens=-1), "hypic_seam_tokens=-1: expected an integer from 0 to"),
    "absurd seam": (option(seam_tokens=10**6), "hypic_seam_tokens=1000000: expected an integer from 0 to"),
    "seam that is no integer": (option(seam_tokens="w"), "expected an integer"),
    "unknown context": (option(context="page"), "hypic_context='page': expected one of none"),
    "islands of nothing": (option(islands="query-0"), "expected 1 <= percent <= 50"),
    "context that a method cannot have": (
        option(link="epic-0", context="lead"),
        "puts its own tokens before a segment",
    ),
    "unknown mode": (
        option(segment_mode="paragraphs"),
        "hypic_segment_mode='paragraphs': expected one of off, structure, text, cdc",
    ),
    "what a mode found": (option(found={"mode": "text", "pieces": 1}), "hypic_found"),
    "unknown option": (option(seem=4), "unknown request option 'hypic_seem'"),
    "only separators": ({"prompt": SEP * 3}, "no tokens besides separators"),
    "only padding": ({"prompt": PAD + SEP + PAD}, "no tokens besides separators"),
    "unknown ids": ({"prompt": [1, 99999]}, "99999"),
    "too long": ({"prompt": SEP.join(["w1 " * 20000, "w2 " * 500, "w3"])}, "maximum context length is 20480"),
    "too long by padding": ({"prompt": "w1" + PAD * 20500 + SEP + "w2"}, "maximum context length is 20480"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_a_reason(client, case):
    change, reason = REFUSALS[case]
    response = client.post({"prompt": SEGMENT + SEP + "w1", **change})
    assert response.status_code == 400, response.text
    assert reason in response.json()["error"]["message"]


def test_refused_in_chat_in_streams_and_for_embeddings(client):
    messages = [{"role": "user", "content": SEP + SEGMENT + SEP + "w1"}]
    for stream in (False, True):
        body = {"messages": messages, **option(link="magic"), "stream": stream}
        response = client.post(body, "/v1/chat/completions")
        assert "hypic_link='magic'" in response.text
        assert response.status_code == 400 or stream
    assert client.post({"input": SEGMENT + SEP + "w1"}, "/v1/embeddings").status_code == 404


def test_empty_and_repeated_segments(client, question):
    q = question(200)
    assert text(client.complete(q.prompt())) == q.answer
    assert outcome(client.complete(q.prompt().replace(SEP, SEP * 3))) == (q.answer, REUSED)
    prompt = SEP.join(["<bos> <sys> w3 .", SEGMENT, SEGMENT, "w1 w2"])
    client.complete(prompt)
    assert cached(client.complete(prompt)) == 2 * (DOCUMENT_TOKENS - 2 * SEAM)


@pytest.mark.parametrize(
    "prompt",
    ["w1", SEP + "w1", SEGMENT + SEP + "w1", f"w1{SEP}w2{SEP}w3", SEP + PDEP + "w1", PAD + "w1"],
)
def test_prompts_and_segments_of_one_token(client, prompt):
    for _ in range(2):
        assert client.complete(prompt)["usage"]["completion_tokens"] > 0


def test_500_short_segments_are_computed_in_the_stream(client):
    answer = client.complete(SEP.join(["<bos>", *["w1 w2 w3"] * 500, "w4"]))
    assert answer["usage"]["completion_tokens"] > 0 and cached(answer) == 0


@pytest.mark.slow
def test_more_than_the_pool_holds(client):
    # Segments that fit are cached, the rest is computed in the stream; nothing waits for ever.
    segments = [" ".join(f"w{(i * k + k * k) % 96}" for k in range(30)) for i in range(500)]
    numbered = [f"{s} val{i // 100} val{i % 100}" for i, s in enumerate(segments)]
    prompt = SEP.join(["<bos>", *numbered, "w4"])
    options = {"hypic_link": "block"}  # no seams: all 32 tokens of a segment are cached
    client.complete(prompt, vllm_xargs=options)
    before = client.counts()
    client.complete(prompt, vllm_xargs=options)
    client.idle()
    assert client.counts()["tokens_reused"] - before["tokens_reused"] == POOL_SEGMENTS * 32
    long = " ".join(f"w{i * i % 89}" for i in range(12000))
    assert client.complete(SEP.join(["<bos>", long, SEGMENT, "w1"]))["usage"]["completion_tokens"] > 0
