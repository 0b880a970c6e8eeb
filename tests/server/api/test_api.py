"""What a client of the server can do with separators, and what it reads in usage and metrics."""

import math

import httpx
import pytest

from benchmarks.lib.client import ask

from .conftest import DOCUMENT_TOKENS, DOCUMENTS, REUSED, SEAM, cached, outcome, text

SEP = "<|hypic_sep|>"


def test_documents_are_reused_in_any_order_and_on_any_surface(client, question):
    q = question(100)
    cold = client.complete(q.prompt())
    assert outcome(cold) == (q.answer, 0)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 4, 7, 1, 6, 2, 5]):
        assert outcome(client.complete(q.prompt(order))) == (q.answer, REUSED)
    assert outcome(client.complete(client.token_ids(q.prompt()))) == (q.answer, REUSED)
    chat = client.chat(q.messages())
    assert outcome(chat) == (q.answer, REUSED)
    assert chat["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"]
    q = question(101)
    messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in q.messages()]
    assert text(client.chat(messages)) == q.answer and cached(client.chat(q.messages())) == REUSED


def test_streamed_text_is_the_text(client, question):
    q = question(102)
    for path, body in (
        ("/v1/completions", {"prompt": q.prompt()}),
        ("/v1/chat/completions", {"messages": q.messages()}),
    ):
        answer = ask(client.server.url, path, {**body, "max_tokens": 8, "temperature": 0})
        assert answer.text.strip() == q.answer and answer.finish_reason == "stop"
        assert 0 < answer.first_token_s <= answer.total_s
    assert answer.cached_tokens == REUSED  # of the last, which is warm


def test_several_choices_stop_strings_and_seeds(client, question):
    q, other = question(103), question(104)
    answer = client.complete(q.prompt(), n=3, temperature=0.01)
    assert [c["text"].strip() for c in answer["choices"]] == [q.answer] * 3
    answer = client.complete([q.prompt(), other.prompt()])
    assert [c["text"].strip() for c in answer["choices"]] == [q.answer, other.answer]
    q = question(105)
    *before, last = q.answer.split()
    answer = client.complete(q.prompt(), stop=[last])
    assert text(answer).split() == before and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == last
    # Seeds fix sampled answers.
    prompt = question(105).prompt()
    options = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    first = client.complete(prompt, seed=1, **options)
    assert text(client.complete(prompt, seed=1, **options)) == text(first)
    assert text(client.complete(prompt, seed=2, **options)) != text(first)
    # 4 k tokens take two steps of 2048: the first draws a token that is thrown away.
    prompt = question(106).plain() * 5
    options["seed"] = 1
    assert text(client.complete(prompt, **options)) == text(client.complete(prompt, **options))


def test_logprobs_are_the_same_cold_and_warm(client, question):
    q = question(107)
    cold = client.complete(q.prompt(), logprobs=3)
    warm = client.complete(q.prompt(), logprobs=3)
    assert cached(cold) == 0 and cached(warm) == REUSED
    assert cold["choices"][0]["logprobs"] == warm["choices"][0]["logprobs"]
    top = cold["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(top) == 3 and sum(map(math.exp, top.values())) <= 1.001
    content = client.chat(q.messages(), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [t["token"].strip() for t in content][:1] == q.answer.split()[:1]


def test_structured_output(client, question):
    q = question(108)
    first = q.answer.split()[0]
    assert text(client.complete(q.prompt(), structured_outputs={"choice": [first, "w1"]})) == first
    answer = client.complete(q.prompt(), structured_outputs={"regex": "w[0-9]+"})
    assert text(answer).startswith("w") and cached(answer) == REUSED


def test_metrics_count_what_happened(client, question):
    q = question(109)
    before = client.counts()
    cold, warm = client.complete(q.prompt()), client.complete(q.prompt(), max_tokens=1)
    client.idle()
    after = client.counts()
    gained = {name: after[name] - before[name] for name in after}
    logical = warm["usage"]["prompt_tokens"] - DOCUMENTS - 1  # separators take no position
    assert (cached(cold), cached(warm)) == (0, REUSED) and gained["requests"] == 2
    assert gained["segments_queried"] == 2 * DOCUMENTS
    assert gained["segments_hit"] == gained["segments_computed"] == DOCUMENTS
    assert gained["tokens_reused"] == REUSED
    assert gained["tokens_computed"] == 2 * logical - REUSED
    assert gained["seam_tokens"] == 2 * DOCUMENTS * 2 * SEAM
    assert after["pinned"] == after["waiting"] == 0
    assert 0 < after["pool_bytes_used"] <= after["pool_bytes_capacity"]
    assert after["records"] >= DOCUMENTS
    # Requests without separators touch nothing of ours.
    q = question(110)
    before = client.counts()
    assert text(client.complete(q.plain())) == q.answer
    client.idle()
    assert client.counts() == before


@pytest.mark.parametrize(
    ("options", "reused_per_document"),
    [
        ({"hypic_link": "hypic", "hypic_seam_tokens": 4}, DOCUMENT_TOKENS - 8),
        ({"hypic_seam_tokens": 0}, DOCUMENT_TOKENS),
        ({"hypic_link": "epic-8"}, DOCUMENT_TOKENS - 8),
        ({"hypic_link": "epic-8", "hypic_seam_tokens": 4}, DOCUMENT_TOKENS - 8),
        ({"hypic_link": "epic-0"}, DOCUMENT_TOKENS),
        ({"hypic_link": "block"}, DOCUMENT_TOKENS),
        ({"hypic_link": "naive"}, DOCUMENT_TOKENS - 2 * SEAM),
        ({"hypic_context": "lead"}, DOCUMENT_TOKENS - 2 * SEAM),
        ({"hypic_context": "text"}, DOCUMENT_TOKENS - 2 * SEAM),
        ({"hypic_link": "full"}, 0),
    ],
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else "",
)
def test_options_of_a_request(client, question, options, reused_per_document):
    q = question(111)
    client.complete(q.prompt(), vllm_xargs=options)
    answer = client.complete(q.prompt([1, 0, 2, 3, 4, 5, 6, 7]), vllm_xargs=options)
    assert cached(answer) == DOCUMENTS * reused_per_document
    if options.get("hypic_link") != "naive":  # a wrong method, there to be compared with
        assert text(answer) == q.answer


def test_islands_of_a_request_are_computed_and_counted(client, question):
    q, options = question(113), {"hypic_islands": "query-20"}
    client.complete(q.prompt())
    before = client.counts()
    answer = client.complete(q.prompt(), vllm_xargs=options)
    client.idle()
    gained = {name: count - before[name] for name, count in client.counts().items()}
    assert gained["segments_computed"] == 0, "records are the same with islands and without"
    assert 0 < gained["island_tokens"] <= DOCUMENTS * (DOCUMENT_TOKENS - 2 * SEAM) // 5
    assert cached(answer) == DOCUMENTS * (DOCUMENT_TOKENS - 2 * SEAM) - gained["island_tokens"]
    assert text(answer) == q.answer


def test_a_prompt_that_ends_in_a_separator_warms_its_segments(client, question):
    q = question(113)
    warm_up = client.complete(SEP + SEP.join(q.documents) + SEP)
    assert text(warm_up) == "" and warm_up["choices"][0]["finish_reason"] == "stop"
    assert outcome(client.complete(q.prompt())) == (q.answer, REUSED)
    chat = client.chat([{"role": "user", "content": SEP + SEP.join(q.documents) + SEP}])
    assert not chat["choices"][0]["message"]["content"]


def test_tenants_with_different_salts_share_nothing(client, question):
    q = question(114)
    before = client.counts()
    answers = [client.complete(q.prompt(), cache_salt=salt) for salt in ("one", "two", "one")]
    unsalted = client.complete(q.prompt())
    client.idle()
    assert [cached(a) for a in (*answers, unsalted)] == [0, 0, REUSED, 0]
    assert {text(a) for a in (*answers, unsalted)} == {q.answer}
    after = client.counts()
    assert after["segments_computed"] - before["segments_computed"] == 3 * DOCUMENTS
    assert after["segments_hit"] - before["segments_hit"] == DOCUMENTS


def test_the_next_turn_of_a_chat_reuses_documents(client, question):
    q = question(115)
    turn = [*q.messages(), {"role": "assistant", "content": text(client.chat(q.messages()))}]
    second = client.chat([*turn, {"role": "user", "content": q.question}])
    assert cached(second) >= REUSED
    assert text(second).split()[:1]


def test_clients_that_leave_free_everything(client, question):
    q = question(116)
    body = {"prompt": q.prompt(), "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{client.server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(5):
            next(lines)
        held = client.server.wait_for_metrics(lambda m: m["vllm:hypic_pinned"] == DOCUMENTS)
        assert held["vllm:num_requests_running"] == 1
    client.idle()
    assert cached(client.complete(q.prompt())) == REUSED
    # A client that leaves before its documents are computed.
    q = question(117)
    long = [f"{document} " * 20 for document in q.documents]
    # So long an answer that it cannot be there when this process gets to look, however busy the machine is.
    body = {"prompt": SEP.join(["w1", *long, q.question]), "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{client.server.url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))
    client.idle()
    assert text(client.complete(q.prompt())) == q.answer
