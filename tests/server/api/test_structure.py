"""Chats cut by their own structure, on a real server: ids as ever, records in any order, counts."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import pre_tokenizers

from benchmarks.lib.serving import Server
from vllm_hypic.connector.stats import MODE_COUNTERS, MODES

from .conftest import answered
from .test_segments import ask, cached, document, ids

CUT = {"hypic_segment_mode": "structure"}
QUESTION = {"role": "user", "content": "Which one?"}
SEAMS = 2 * 8 + 1
"""Tokens of a segment that are computed, its last among them, which belongs to what follows."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""Of the server's tokenizer, behind three special tokens: a token is a byte."""


def tool(i: object, characters: int = 250) -> dict[str, Any]:
    """Of about 130 characters more."""
    text = document(("tool", i))[:characters]
    function = {"name": f"tool{i}", "description": text, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": list(content) or "Which one?"}]
    return {"messages": said, "tool_choice": "none" if "tools" in fields else None, **fields}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def counts(server: Server, mode: str = "structure") -> dict[str, float]:
    """``vllm:hypic_mode_*`` of one mode."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    return {
        sample.name.removeprefix("vllm:hypic_mode_").removesuffix("_total"): sample.value
        for sample in chain.from_iterable(family.samples for family in families)
        if sample.name.startswith("vllm:hypic_mode_") and sample.labels["mode"] == mode
        if sample.name.endswith("_total")
    }


def forms() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """Requests that hold the same pieces in two orders, and these pieces' lengths."""
    tools, texts = [tool(i) for i in range(5)], [document(("structure", i)) for i in range(5)]
    lengths = [len(text) for text in texts]

    def orders(pieces: list[Any]) -> list[list[Any]]:
        return [pieces, [pieces[i] for i in (3, 0, 4, 2, 1)]]

    described = [len(document(("tool", i))[:250]) for i in range(5)]
    yield "tools", [chat(tools=order) for order in orders(tools)], described
    documents = orders([{"text": text} for text in texts])
    yield "documents", [chat(documents=order) for order in documents], lengths
    given = [{"documents": order} for order in documents]
    yield "template arguments", [chat(chat_template_kwargs=args) for args in given], lengths
    contents = orders([part(text) for text in texts])
    yield "parts", [chat(*content, part("Which one?")) for content in contents], lengths
    marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    contents = orders([part(text, **marks) for text in texts])
    yield "marked parts", [chat(*content) for content in contents], lengths
    results = [{"role": "tool", "tool_call_id": str(i), "content": text} for i, text in enumerate(texts)]
    yield "tool results", [{"messages": [*order, QUESTION]} for order in orders(results)], lengths


FORMS = {name: (bodies, lengths) for name, bodies, lengths in forms()}


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_reused_in_any_order(byte_server: Server, form: str) -> None:
    (body, moved), lengths = FORMS[form]
    ask(byte_server, body, CUT)
    warm, again, plain = (ask(byte_server, moved, options) for options in (CUT, CUT, {}))
    assert cached(warm) >= sum(lengths) - len(lengths) * SEAMS
    assert warm["choices"] == again["choices"]
    assert ids(plain) == ids(warm) and plain["usage"]["prompt_tokens"] == warm["usage"]["prompt_tokens"]
    assert ask(byte_server, moved, {**CUT, "hypic_link": "full"})["choices"] == plain["choices"]


def test_found_segments_have_the_records_and_bits_of_named_ones(byte_server: Server) -> None:
    body = chat(tools=[tool(("named", i)) for i in range(5)])
    cold, warm = (ask(byte_server, body, CUT) for _ in range(2))
    text = "".join("\0" if token < 3 else ALPHABET[token - 3] for token in ids(cold))
    lines = [match.span() for match in re.finditer(r'\{"type".*?\}(?=Ċ|\0)', text)]
    assert len(lines) == 5
    # The last token depends on what follows, in other vocabularies.
    segments = [place for start, stop in lines for place in (start, stop - 1)]
    named = ask(byte_server, {"prompt": ids(cold)}, {"hypic_segment_ranges": segments})
    assert cached(named) == cached(warm) and ids(named) == ids(warm)
    said = [token["logprob"] for token in warm["choices"][0]["logprobs"]["content"]]
    assert named["choices"][0]["logprobs"]["token_logprobs"] == said


@pytest.mark.parametrize("seam", [8, 4])
def test_one_of_thirty_tools_costs_little(byte_server: Server, seam: int) -> None:
    """``pytest -s -k thirty`` prints the table of docs/how-to/without-separators.md."""
    tools = [tool(("thirty", i, seam), 80) for i in range(30)]
    new = tool(("new", seam), 80)
    changes = {
        "exchanged": [*tools[:7], tools[21], *tools[8:21], tools[7], *tools[22:]],
        "moved": [*tools[:7], *tools[8:21], tools[7], *tools[21:]],
        "removed": [*tools[:7], *tools[8:]],
        "replaced": [*tools[:7], new, *tools[8:]],
        "added": [*tools[:7], new, *tools[7:]],
    }
    said = {"messages": [{"role": "system", "content": document("thirty")}, QUESTION], "tool_choice": "none"}
    options = {**CUT, "hypic_seam_tokens": seam}
    ask(byte_server, {**said, "tools": tools}, options)
    for i, (change, changed) in enumerate(changes.items()):
        new["function"]["name"] = f"new{seam}{i}"  # no record of the change before
        answer = ask(byte_server, {**said, "tools": changed}, options)
        prompt = answer["usage"]["prompt_tokens"]
        computed = prompt - cached(answer)
        again = computed - (len(json.dumps(new)) if new in changed else 0)
        print(
            f"{seam}: {change}: {prompt} tokens, {computed / prompt:.1%} computed, {again / prompt:.1%} again"
        )
        assert 0 < again / prompt < 0.1, change


def test_other_endpoints_tell_their_structure_too(byte_server: Server) -> None:
    documents = [document(("endpoints", i)) for i in range(3)]
    described = {"name": "tool", "description": document("endpoint"), "parameters": {"type": "object"}}
    anthropic = {
        "messages": [{"role": "user", "content": [part(text) for text in [*documents, "Which?"]]}],
        "tools": [{"name": "tool", "description": document("endpoint"), "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
        "max_tokens": 4,
    }
    said = [{"type": "input_text", "text": text} for text in [*documents, "Which?"]]
    responses = {
        "input": [{"role": "user", "content": said}],
        "tools": [{"type": "function", **described}],
        "tool_choice": "none",
        "max_output_tokens": 4,
    }
    for path, body in (("messages", anthropic), ("responses", responses)):
        before = counts(byte_server)
        body = {"model": byte_server.model, "temperature": 0, "vllm_xargs": CUT, **body}
        answered(byte_server, f"/v1/{path}", body)
        assert counts(byte_server)["pieces_cut"] - before["pieces_cut"] == 4, path


@pytest.mark.parametrize("mode", ["structure", "text"])
def test_what_a_request_ends_with_is_computed_in_its_stream(byte_server: Server, mode: str) -> None:
    """Question, call, result and begun answer are in no segment, by any API; what stands before them is."""
    old, question, result, begun = (document(("ends", mode, i)) for i in range(4))
    said = [{"role": "user", "content": old}, {"role": "assistant", "content": "Yes."}]
    asked = [*said, {"role": "user", "content": question}]
    function = {"name": "tool", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result_read = [*asked, call, {"role": "tool", "tool_call_id": "1", "content": result}]
    output = {"type": "function_call_output", "call_id": "1", "output": result}
    called = [{"type": "function_call", "call_id": "1", **function}, output]
    used = {"type": "tool_use", "id": "1", "name": "tool", "input": {"a": 1}}
    got = {"type": "tool_result", "tool_use_id": "1", "content": result}
    using = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [got]}]
    begins = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": result_read, "max_tokens": 1}),
        ("chat/completions", {"messages": [*asked, {"role": "assistant", "content": begun}], **begins}),
        ("responses", {"input": [*asked, *called], "max_output_tokens": 1}),
        ("messages", {"messages": [*asked, *using], "max_tokens": 1}),
    ]
    for path, body in bodies:
        before = counts(byte_server, mode)["pieces_cut"]
        body = {"model": byte_server.model, "vllm_xargs": {"hypic_segment_mode": mode}, **body}
        answered(byte_server, f"/v1/{path}", body)
        assert counts(byte_server, mode)["pieces_cut"] == before + 1, path


def test_what_was_found_is_counted_on_every_way(byte_server: Server) -> None:
    long, short = [part(document(("counted", i))) for i in range(3)], [part("a few words")] * 4
    body = chat(*long, *short, part("Which one?"))
    before = counts(byte_server)
    assert set(before) == set(MODE_COUNTERS)
    ask(byte_server, body, CUT)
    warm = ask(byte_server, body, CUT)
    after = counts(byte_server)
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    tokens = sum(len(text["text"]) - 1 for text in long)
    assert grown.pop("tokens_reused") == cached(warm)
    assert grown.pop("tokens_computed") == 2 * warm["usage"]["prompt_tokens"] - cached(warm)
    assert grown == {
        "requests": 2,
        "pieces": 2 * 7,
        "pieces_cut": 2 * 3,
        "pieces_short": 2 * 4,
        "segment_tokens": 2 * tokens,
    }
    # Every way to segments has its counts.
    prompt = "\n\n".join(document(("ways", i)) for i in range(4))
    named = [0, 200, 200, 400]
    separated = prompt.replace("\n\n", "<|hypic_sep|>")
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "text": (prompt, {"hypic_segment_mode": "text"}),
        "structure": (prompt, CUT),
        "cdc": (prompt, {"hypic_segment_mode": "cdc"}),
        "named": (prompt, {"hypic_segment_ranges": named}),
        "separators": (separated, {}),
    }
    assert set(ways) == set(MODES) - {"prefix"}, (
        "which this server does not cache: engine/test_prefix_passes.py"
    )
    for mode, (text, options) in ways.items():
        before = counts(byte_server, mode)
        _, warm = (ask(byte_server, {"prompt": text}, options) for _ in range(2))
        after = counts(byte_server, mode)
        grown = {name: after[name] - before[name] for name in after}
        assert (grown["pieces_cut"] > 0) == (mode in ("text", "structure")), mode
        if mode != "cdc":  # the prompt is shorter than its pieces
            assert grown["requests"] == 2 and grown["tokens_reused"] > 0, mode
            assert grown["tokens_computed"] > warm["usage"]["prompt_tokens"] - cached(warm), mode


@pytest.mark.parametrize("bad", [[], [{}], "x", [{"text": 3}], [{"text": "\ud800" * 200}], {"a": 1}])
def test_bad_documents_are_answered_as_ever(byte_server: Server, bad: Any) -> None:
    body = {**chat(chat_template_kwargs={"documents": bad}), "max_tokens": 1}
    url, json_type = f"{byte_server.url}/v1/chat/completions", {"content-type": "application/json"}
    found, plain = (
        httpx.post(url, content=json.dumps({**body, **options}), headers=json_type, timeout=60).status_code
        for options in ({"vllm_xargs": CUT}, {})
    )
    assert found == plain


def test_requests_at_the_same_time_have_their_own_structure(byte_server: Server) -> None:
    bodies = [
        chat(
            *(part(document(("together", i, n))) for n in range(1 + i % 3)),
            part("Which?"),
            tools=[tool((i, 1))],
        )
        for i in range(12)
    ]
    for body in bodies:
        ask(byte_server, body, CUT)
    alone = [ask(byte_server, body, CUT) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: ask(byte_server, body, CUT), bodies))
    assert [ids(answer) for answer in together] == [ids(answer) for answer in alone]
    assert [cached(answer) for answer in together] == [cached(answer) for answer in alone]
    assert min(map(cached, alone)) > 0
