"""gpt-oss, whose chats harmony writes: cut at separators and by structure, and all else as harmony has it.

Prompts without separators are what harmony itself makes of the same messages, which it does in this process.
"""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine import tiny_models
from lib.one_process import ONE_PROCESS
from openai_harmony import Message, Role, TextContent
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.exceptions import VLLMValidationError

from benchmarks.lib.serving import Server
from vllm_hypic.cache_api.client import SegmentCache
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.engine.tokenizer import TOKENS_ENV
from vllm_hypic.suggest.prompts import FrontEnd

from .conftest import CACHE_API, ENV, answered, post
from .test_explain import check_whole, explained, segments
from .test_structure import part

pytestmark = pytest.mark.timeout(600)
SEP, SEP_PART = "<|hypic_sep|>", {"type": "hypic_sep"}
MARKS, SEP_ID, ROWS = 199998, 200019, 201088
"""Ids from which on tokens are special, have no name in the tokenizer, and no row in a published gpt-oss."""
DATE = "2026-01-02"
WORDS = ["river", "stone", "winter", "garden", "paper", "window", "silver", "music", "bridge", "market"]
TOKENS = 150
"""Of a document."""
REUSED = TOKENS - 2 * 8 - 1
"""Of these come from its record: a seam has 8, and a found document's last token belongs to what follows."""
SYSTEM, QUESTION = "You answer from documents.", "Which of them is the longest?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random gpt-oss whose tokenizer has the vocabulary that the package ``openai_harmony`` holds.

    Words that are tokens have harmony's ids; others are cut into bytes: there are no merges.
    """
    folder = tmp_path_factory.mktemp("harmony") / "model"
    tokens = {"vocab_size": ROWS, "bos_token_id": MARKS, "eos_token_id": 200002, "pad_token_id": MARKS + 1}
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    fields = {**tokens, **heads, **experts, **layers, "sliding_window": 64}
    tiny_models.save(folder, "GptOss", fields, torch.bfloat16)
    harmony, letters = harmony_utils.get_encoding(), bytes_to_unicode()
    spelt = {"".join(letters[b] for b in harmony._inner.decode_bytes([i])): i for i in range(MARKS)}
    tokenizer = Tokenizer(models.BPE(vocab=spelt, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [harmony.decode([i]) for i in range(MARKS, SEP_ID)]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    marks = {"bos_token": names[0], "eos_token": "<|return|>", "pad_token": names[1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **marks)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(
        model,
        *("--attention-backend", "hypic", "--enforce-eager", "--kv-cache-memory-bytes", "128M"),
        *("--max-model-len", "4096", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
        *("--additional-config", '{"hypic": {"segment": {"newest_tokens": 256, "query_tokens": 32}}}'),
        env=ENV | CACHE_API | ONE_PROCESS | {"VLLM_SYSTEM_START_DATE": DATE},
        log=model.parent / "server.log",
    ) as running:
        yield running
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200


def document(seed: object) -> str:
    rng = random.Random(f"harmony {seed}")
    return "The" + "".join(f" {rng.choice(WORDS)}" for _ in range(TOKENS - 2)) + "."


def documents(seed: object, n: int = 3) -> list[str]:
    return [document((seed, i)) for i in range(n)]


def chat(*contents: Any, system: str = SYSTEM, **body: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": content} for content in contents]
    return {"messages": [{"role": "system", "content": system}, *said], **body}


def asked(server: Server, body: dict[str, Any]) -> tuple[list[int], int]:
    """The prompt of a chat, and how much of it came from records."""
    body = {"temperature": 0, "max_tokens": 4, "return_token_ids": True, **body}
    found = answered(server, "/v1/chat/completions", body)
    return found["prompt_token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def responded(server: Server, body: dict[str, Any], **more: Any) -> tuple[int, int]:
    """The length of a response's prompt, and how much of it came from records."""
    said = {"input": body["messages"], "vllm_xargs": body.get("vllm_xargs"), **more}
    usage = answered(server, "/v1/responses", {"temperature": 0, "max_output_tokens": 4, **said})["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def of_harmony(*pieces: Sequence[str], system: str = SYSTEM) -> list[int]:
    """What harmony makes of a system text and messages of a user, with a text for each part."""
    before = harmony_utils.get_system_message(start_date=DATE), harmony_utils.get_developer_message(system)
    said = [Message.from_role_and_contents(Role.USER, [TextContent(text=p) for p in one]) for one in pieces]
    return harmony_utils.render_for_completion([*before, *said])


def without(prompt: Sequence[int]) -> list[int]:
    return [token for token in prompt if token != SEP_ID]


def test_separators_cut_chats_and_responses(server: Server) -> None:
    """In texts and as parts; explained as they are computed."""
    found, before = documents("cut"), server.metrics()["vllm:hypic_requests_total"]
    joined = SEP.join(["", *found, QUESTION])
    parts = [SEP_PART, *chain.from_iterable((part(text), SEP_PART) for text in found), part(QUESTION)]
    for i, body in enumerate((chat(joined), chat(parts))):
        prompt, cached = asked(server, body)
        assert without(prompt) == of_harmony([*found, QUESTION])
        assert prompt.count(SEP_ID) == len(found) + 1 and (cached >= 3 * REUSED) == (i > 0)
        about = explained(server, body)
        check_whole(about, prompt)
        assert [p["kind"] for p in segments(about)] == ["leading", *["segment"] * 3]
        assert asked(server, body) == (prompt, about["tokens_reused"])
        template = {"reasoning_effort": "high"}
        said = {"messages": body["messages"], "chat_template_kwargs": template}
        assert answered(server, "/tokenize", said)["tokens"] == asked(server, body | template)[0]
    moved = chat(SEP.join(["", *reversed(found), QUESTION]))
    assert responded(server, moved) == (len(prompt), about["tokens_reused"])
    assert server.metrics()["vllm:hypic_requests_total"] == before + 7


def test_separators_cut_wherever_texts_stand(server: Server) -> None:
    """Of several parts, turns and tools, each keeps the tokens that harmony gives it."""
    first, second, third = documents("places")
    bodies = {
        "parts beside": (
            chat([part("One "), part(f" two{SEP}{first}"), part("three")]),
            of_harmony(["One ", " two", first, "three"]),
        ),
        "turns": (chat(f"{first}{SEP}{second}", QUESTION), of_harmony([first, second], [QUESTION])),
    }
    for name, (body, plain) in bodies.items():
        prompt, _ = asked(server, body)
        assert without(prompt) == plain and prompt.count(SEP_ID) == 1, name
    tool = {"name": "look", "description": f"Looks.{SEP}{third}", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{SEP}{second}{SEP}"},
    ]
    body = chat(QUESTION, system=f"{SYSTEM}{SEP}{first}", tools=[{"type": "function", "function": tool}])
    body["messages"] += turns
    prompt, _ = asked(server, body)
    assert answered(server, "/tokenize", body)["tokens"] == prompt
    encode = harmony_utils.get_encoding().encode
    places = [-1, *(i for i, token in enumerate(prompt) if token == SEP_ID)]
    runs = [prompt[start + 1 : stop] for start, stop in zip_longest(places, places[1:])]
    # Behind the first two harmony's own text goes on.
    for run, text in zip(runs[1:4], (first, third, second), strict=True):
        assert run[: TOKENS - 1] == encode(text)[:-1]
    assert runs[3] == encode(second)
    shown = "".join(run["text"] for p in explained(server, body)["parts"] for run in p["runs"])
    assert shown.count(SEP) == len(runs) - 1 == 4
    items = [*body["messages"][:2], {**call["function"], "type": "function_call", "call_id": "1"}]
    items.append({"type": "function_call_output", "call_id": "1", "output": turns[1]["content"]})
    length, cached = responded(server, {"messages": items}, tools=[{"type": "function", **tool}])
    assert length == len(prompt) and cached == explained(server, body)["tokens_reused"] > 3 * REUSED - 8


def test_compiled_segments_serve_chats(server: Server) -> None:
    text = document("compiled")
    with SegmentCache(server.url, timeout_s=120) as cache:
        lead = cache.compile(message={"role": "system", "content": f"{SYSTEM} {document('lead')}"})
        segment = cache.compile(text)
    prompt, cached = asked(server, chat(f"{segment.form}{QUESTION}", system=lead.form))
    assert without(prompt) == of_harmony(["", text, QUESTION], system=f"{SYSTEM} {document('lead')}")
    assert cached == lead.tokens + segment.tokens - 2 * 8


@pytest.mark.parametrize("mode", ["structure", "text"])
def test_modes_find_segments(server: Server, mode: str) -> None:
    """Separators come first in each mode."""
    found, extra = documents(mode), {"vllm_xargs": {"hypic_segment_mode": mode}}
    pieces, turned = [*found, QUESTION], [*found[::-1], QUESTION]
    if mode == "text":
        pieces, turned = ["\n\n".join(pieces)], ["\n\n".join(turned)]
    body, moved = (
        chat(order[0] if mode == "text" else [part(p) for p in order], **extra) for order in (pieces, turned)
    )
    prompt, cached = asked(server, body)
    assert prompt == of_harmony(pieces) and cached < REUSED
    about = explained(server, moved)
    assert about["mode"] == mode and about["pieces"]["pieces_cut"] == 3
    assert about["tokens_reused"] >= 3 * REUSED
    assert asked(server, moved)[1] == about["tokens_reused"]
    as_input = json.loads(json.dumps(moved).replace('"type": "text"', '"type": "input_text"'))
    assert responded(server, as_input) == (len(prompt), about["tokens_reused"])
    separated = chat(SEP.join(["", *found, QUESTION]), **extra)
    about = explained(server, separated)
    assert about["mode"] == "separators" and [p["kind"] for p in segments(about)].count("segment") == 3
    assert asked(server, separated)[0].count(SEP_ID) == 4


def test_tools_are_pieces(server: Server) -> None:
    def tool(i: int) -> dict[str, Any]:
        return {"name": f"tool{i}", "description": document(("tool", i)), "parameters": {"type": "object"}}

    tools = [tool(i) for i in range(3)]
    extra = {"hypic_segment_mode": "structure"}
    bodies = [
        chat(QUESTION, tools=[{"type": "function", "function": t} for t in order])
        for order in (tools, tools[::-1])
    ]
    prompt, cached = asked(server, {**bodies[0], "vllm_xargs": extra})
    about = explained(server, {**bodies[1], "vllm_xargs": extra})
    assert cached < REUSED and about["tokens_reused"] >= 3 * REUSED
    flat = [{"type": "function", **t} for t in reversed(tools)]
    body = {**bodies[1], "vllm_xargs": extra}
    assert responded(server, body, tools=flat) == (len(prompt), about["tokens_reused"])


def test_what_cannot_be_is_refused(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": f"look{SEP}", "arguments": "{}"}}
    called = chat(QUESTION)
    called["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
    earlier = [{"author": {"role": "user"}, "content": [SEP_PART, part("x")]}]
    message = {"role": "user", "content": QUESTION}
    with_id = {"input": [{"role": "user", "content": f"<|hypic_segment:abc|>{QUESTION}"}]}
    for path, body, reason in (
        ("/v1/chat/completions", called, "are allowed in contents, not in names"),
        ("/v1/hypic/explain", called, "are allowed in contents, not in names"),
        ("/v1/responses", {"input": [message], "previous_input_messages": earlier}, "'hypic_sep'"),
        ("/v1/responses", {"input": [{"role": "user", "content": [SEP_PART]}]}, "hypic_sep"),
        ("/v1/responses", with_id, "segment id 'abc' is not known here"),
    ):
        refused = post(server, path, body)
        assert refused.status_code == 400 and reason in refused.text, (path, refused.text)


def test_front_ends_without_the_cache_api(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They know no parts, and where text is literal no texts of separators.  What has another tokenizer stays
    as vLLM has it."""
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", DATE)
    monkeypatch.setenv(TOKENS_ENV, "")  # which the front end sets
    text = f"{document('literal')}{SEP}{QUESTION}"
    with FrontEnd(model, HypicConfig.from_mapping({"token_texts": {"literal": True}}), None, {}) as front_end:

        def prompt(content: Any) -> list[int]:
            request = ChatCompletionRequest.model_validate(chat(content))
            _, [found] = front_end._runner.run(front_end._online.render_chat(request))
            return found["prompt_token_ids"]

        assert prompt(text) == of_harmony([text])
        sealed = prompt(text.replace(SEP, front_end.tokenizer.prompt_texts.sep))
        assert sealed.count(SEP_ID) == 1 and without(sealed) == of_harmony(text.split(SEP))
        with pytest.raises(VLLMValidationError, match=r"part \{'type': 'hypic_sep'\}: expected text"):
            prompt([SEP_PART, part("x")])
        front_end._renderer.tokenizer = front_end.tokenizer._hypic_plain
        assert prompt([SEP_PART, part(text)]) == of_harmony(["", text])
