"""What requests would be, on real servers: explained and then sent, they are what was said."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from benchmarks.lib.serving import Server
from vllm_hypic.cli import main

from .conftest import DOCUMENT_TOKENS, DOCUMENTS, REUSED, SEAM, Client, answered, post
from .test_segments import SEP, ask, cached, document, ids
from .test_structure import CUT, chat, counts, part, tool

STORED = {"resident", "pending", "stored"}


def explained(server: Server, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    return answered(server, "/v1/hypic/explain", body, headers=headers)


def segments(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in found["parts"] if part["key"] is not None]


def check_whole(found: dict[str, Any], prompt: list[int], padding: int = 0) -> None:
    """Runs are the whole prompt, and each token that is no primitive is counted once; ``padding``: that of
    segments."""
    runs = [run for part in found["parts"] for run in part["runs"]]
    assert [run["start"] for run in runs] == [0, *(run["stop"] for run in runs[:-1])]
    assert runs[-1]["stop"] == found["prompt_tokens"] == len(prompt)
    texts = [part["runs"] for part in found["parts"] if part["kind"] != "primitive"]
    own = sum(runs[-1]["stop"] - runs[0]["start"] for runs in texts)
    assert found["tokens_reused"] + found["tokens_prefix_cached"] + found["tokens_computed"] == own - padding
    reused = [
        run["stop"] - run["start"]
        for part in segments(found)
        for run in part["runs"]
        if part["state"] in STORED and not run["recomputed"]
    ]
    assert sum(reused) == found["tokens_reused"]


def text(found: dict[str, Any]) -> str:
    return "".join(run["text"] for part in found["parts"] for run in part["runs"])


def forms() -> dict[str, dict[str, Any]]:
    documents = [document(("explain", i)) for i in range(4)]
    said = "\n\n".join(["You answer from documents.", *documents, "Which of them is the longest?"])
    cut = {"vllm_xargs": {"hypic_segment_mode": "text"}}
    leading = SEP.join([document("leading"), *documents[:2], "Why?"])
    return {
        "separators": {"prompt": SEP.join(["Answer.", *documents, "Why?"])},
        "text": {"prompt": said, **cut},
        "text in a chat": {"messages": [{"role": "user", "content": said}], **cut},
        "tools": chat(tools=[tool(("explain", i)) for i in range(4)], vllm_xargs=CUT),
        "documents": chat(
            chat_template_kwargs={"documents": [{"text": t} for t in documents[1:]]}, vllm_xargs=CUT
        ),
        "twice": {"prompt": SEP.join(["Answer.", documents[0], documents[1], documents[0], "Why?"])},
        "leading": {"prompt": leading},
        "context": {"prompt": leading, "vllm_xargs": {"hypic_context": "lead", "hypic_islands": "query-10"}},
        "several choices, streamed": {"prompt": said[::-1], "n": 3, "temperature": 1, "stream": True, **cut},
    }


@pytest.mark.parametrize("form", forms())
def test_what_is_said_is_what_happens(byte_server: Server, form: str) -> None:
    salt = {"cache_salt": f"explain {form.replace(',', '')}"}
    body = forms()[form] | salt
    metrics, before = byte_server.metrics(), explained(byte_server, body)
    mode = before["mode"]
    pieces = counts(byte_server, mode)["pieces"]
    assert explained(byte_server, body) == before, "explaining caches nothing"
    assert {part["state"] for part in segments(before)} == {"absent"}
    assert before["tokens_reused"] == 0
    # As it was sent, but for what `ask` cannot read.
    options = body.get("vllm_xargs", {})
    sent = {**body, "stream": False, "n": 1, "temperature": 0}
    cold = ask(byte_server, sent, options)
    assert cached(cold) == 0
    check_whole(before, ids(cold))
    after = explained(byte_server, body)
    check_whole(after, ids(cold))
    assert {part["state"] for part in segments(after)} == {"resident"} and after["reason"] is None
    same = ("mode", "link", "pieces", "prompt_tokens")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert [part["key"] for part in after["parts"]] == [part["key"] for part in before["parts"]]
    warm = ask(byte_server, sent, options)
    assert after["tokens_reused"] + after["tokens_prefix_cached"] == cached(warm) > 0
    assert after["prompt_tokens"] == warm["usage"]["prompt_tokens"]
    elsewhere = explained(byte_server, {**body, "cache_salt": "elsewhere"})
    assert {part["state"] for part in segments(elsewhere)} == {"absent"}, "of another tenant"
    of_header = {name: value for name, value in body.items() if name != "cache_salt"}
    assert explained(byte_server, of_header, **{"X-Cache-Salt": salt["cache_salt"]}) == after
    assert byte_server.metrics()["vllm:hypic_requests_total"] - metrics["vllm:hypic_requests_total"] == 2
    assert counts(byte_server, mode)["pieces"] - pieces == 2 * before["pieces"].get("pieces", 0)
    if before["pieces"]:
        leads = before["parts"][0]["kind"] == "leading"
        assert before["pieces"]["pieces_cut"] == len(segments(before)) - leads


def test_parts_say_what_they_are(byte_server: Server) -> None:
    documents = [document(("parts", i)) for i in range(2)]
    found = explained(byte_server, {"prompt": SEP.join([document("lead"), *documents, "Why \u20ac?"])})
    kinds = ["leading", "primitive", "segment", "primitive", "segment", "primitive", "stream"]
    assert [part["kind"] for part in found["parts"]] == kinds
    assert text(found) == SEP.join([document("lead"), *documents, "Why \u20ac?"])
    for segment, said in zip(segments(found)[1:], documents, strict=True):
        lengths = [(run["stop"] - run["start"], run["recomputed"]) for run in segment["runs"]]
        assert lengths == [(8, True), (len(said) - 16, False), (8, True)]
    body = document("padded")
    odd = f"Lead<|hypic_pad|>s{SEP}{body[:60]}<|hypic_pad|>{body[60:]}<|hypic_pdep|>{body[:20]}{SEP}Why?"
    padded = explained(byte_server, {"prompt": odd})
    check_whole(padded, [0] * len(re.sub(r"<.*?>", "x", odd)), padding=1)
    [segment] = segments(padded)
    assert "".join(run["text"] for run in segment["runs"]) == f"{body[:60]}<|hypic_pad|>{body[60:]}"
    prompt = SEP.join(["Lead", documents[0], documents[0].split()[9] + "?"])
    found = explained(byte_server, {"prompt": prompt, "vllm_xargs": {"hypic_islands": "query-20"}})
    [islands] = [part["runs"] for part in found["parts"] if part["kind"] == "segment"]
    assert len(islands) > 3 and sum(run["recomputed"] for run in islands) >= 3
    # Ids stand for their segments.
    content = document("by id")
    made = answered(byte_server, "/v1/hypic/segments", {"text": content})
    found = explained(byte_server, {"prompt": f"Lead<|hypic_segment:{made['id']}|>Why?"})
    [segment] = segments(found)
    assert segment["key"] == made["key"] and segment["state"] == "resident"
    assert text(found) == f"Lead{SEP}{content}{SEP}Why?"


def test_prefix_caching_and_tokens_of_a_prompt(client: Client, question) -> None:
    """A server with vLLM's prefix cache: both together are what usage says."""
    q = question(900)
    body = {"prompt": client.token_ids(q.prompt())}
    cold = explained(client.server, body)
    assert cold["tokens_reused"] == cold["tokens_prefix_cached"] == 0
    client.complete(body["prompt"])
    warm = explained(client.server, body)
    assert warm["tokens_reused"] == REUSED == DOCUMENTS * (DOCUMENT_TOKENS - 2 * SEAM)
    used = client.complete(body["prompt"])["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert warm["tokens_reused"] + warm["tokens_prefix_cached"] == used
    for prompt in (q.plain(), f"{q.prompt()} {q.plain()}"):  # with a question of several blocks
        for _ in range(2):  # vLLM keeps some states when a prefix comes again
            client.complete(prompt)
        found = explained(client.server, {"prompt": prompt})
        used = client.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found["tokens_prefix_cached"] + found["tokens_reused"] == used
        assert found["tokens_prefix_cached"] > 0, prompt[-20:]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vllm_xargs": {}}, "the prompt has no separators, and hypic_segment_mode is 'off'"),
        ({"vllm_xargs": {**CUT, "hypic_link": "full"}}, "link method 'full' reuses nothing"),
        ({"prompt_logprobs": 1, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": "short"}, "hypic_segment_mode='text' finds no segments"),
        ({"prompt": f"Lead{SEP}short{SEP}Why?"}, "no piece of the prompt is long enough"),
        ({"prompt": f"Lead{SEP}{document('warm')}{SEP}"}, "the prompt ends in a separator"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_why_there_are_no_segments(byte_server: Server, fields: dict[str, Any], reason: str) -> None:
    prompt = "\n\n".join(document(("reason", i)) for i in range(4))
    found = explained(byte_server, {"prompt": prompt, "vllm_xargs": {"hypic_segment_mode": "text"}, **fields})
    assert reason in found["reason"]
    check_whole(found, [0] * found["prompt_tokens"])


BAD: list[tuple[Any, str]] = [
    ({}, "either messages (a chat) or a prompt"),
    ({"prompt": "x", "messages": []}, "either messages (a chat) or a prompt"),
    ([], "dict"),
    ({"prompt": ["x", "y"]}, "expected one prompt, got 2"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "model": "nobody"}, "nobody"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x" * 9000}, "8192"),
    ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
    ({"prompt": "x", "vllm_xargs": {"hypic_segment_mode": "paragraphs"}}, "hypic_segment_mode='paragraphs'"),
    ({"prompt": "x", "vllm_xargs": {"hypic_command": "explain"}}, "'hypic_command'"),
    ({"prompt": "<|hypic_segment:nobody|>"}, "nobody"),
    ({"messages": [{"role": "user"}], "tools": 3}, "tools"),
    ({"messages": []}, "at least one message"),
]


@pytest.mark.parametrize(("body", "named"), BAD, ids=[str(body)[:40] for body, _ in BAD])
def test_bad_requests_are_refused_by_name(byte_server: Server, body: Any, named: str) -> None:
    answer = post(byte_server, "/v1/hypic/explain", body)
    assert answer.status_code in (400, 404), answer.text
    assert named in answer.json()["error"]["message"]


def test_explaining_beside_requests(byte_server: Server) -> None:
    bodies = [forms()["text"] | {"prompt": "\n\n".join(document((i, n)) for n in range(4))} for i in range(6)]
    before = counts(byte_server, "text")["requests"]
    with ThreadPoolExecutor(12) as pool:
        found = pool.map(lambda body: explained(byte_server, body), [*bodies, *bodies])
        answers = pool.map(lambda body: ask(byte_server, body, body["vllm_xargs"]), bodies)
        for one in found:
            check_whole(one, [0] * one["prompt_tokens"])
        for answer, body in zip(answers, bodies, strict=True):
            again = explained(byte_server, body)
            assert ids(answer) and {part["state"] for part in segments(again)} == {"resident"}
    assert counts(byte_server, "text")["requests"] - before == len(bodies)


def explain(server: Server, *arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["explain", "--url", server.url, *arguments], **options)


def test_the_command_prints_a_prompt_in_colours(byte_server: Server, tmp_path: Path) -> None:
    documents = [part(document(("command", i))) for i in range(3)]
    body = {**chat(*documents, part("Which?")), "vllm_xargs": CUT}
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body))
    ask(byte_server, chat(*documents[:2], part(document("another")), part("Which?")), CUT)
    told = explain(byte_server, str(file), "--json")
    assert told.exit_code == 0 and json.loads(told.output) == explained(byte_server, body)
    plain = explain(byte_server, str(file))
    assert plain.exit_code == 0, plain.output
    for said in (documents[2]["text"], "resident", "absent", "recomputed each time", "mode structure"):
        assert said in plain.output
    coloured = explain(byte_server, str(file), env={"FORCE_COLOR": "1", "TERM": "xterm"}).output
    assert "\x1b[30;42m" in coloured and "\x1b[30;43m" in coloured and "\x1b[30;45m" in coloured
    piped = explain(byte_server, "-", input="A prompt\x1b[31m alone.")
    assert piped.exit_code == 0 and "A prompt\u241b[31m alone." in piped.output
    assert "hypic_segment_mode is 'off'" in piped.output and "\x1b" not in piped.output
    for content, code, told in (
        (b'{"prompt": ', 2, "is not JSON"),
        (b"[]", 2, "expected an object with messages"),
        (b"\xff", 2, "is not UTF-8"),
        (b'{"prompt": "x", "temperature": -1}', 1, "HTTP 400"),
    ):
        file.write_bytes(content)
        refused = explain(byte_server, str(file))
        assert refused.exit_code == code and told in refused.output
    nobody = CliRunner().invoke(main, ["explain", "--url", "http://127.0.0.1:1", "-"], input="x")
    assert nobody.exit_code == 1 and "cannot be reached" in nobody.output


def test_the_page_needs_nothing_from_elsewhere(byte_server: Server) -> None:
    for path in ("/v1/hypic/explain", "/hypic/explain"):
        page = httpx.get(byte_server.url + path, timeout=60)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "src=" not in page.text and "href=" not in page.text
        assert "//" not in page.text.split("<script>")[0]
