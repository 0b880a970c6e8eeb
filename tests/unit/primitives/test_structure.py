"""Segments that a chat request's own structure names, with the tokenizers and templates of many models."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_hypic.config.engine import CONNECTOR, TOKENIZER_MODE
from vllm_hypic.engine.renderer import CHAT
from vllm_hypic.engine.segments import SegmentFinder
from vllm_hypic.engine.tokenizer import register_mode
from vllm_hypic.primitives.structure import MAX_MISSED, Chat, locate

from .test_segmenter import USED, prose

register_mode()

MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LATER = MESSAGES.replace("messages", "messages[1:]")
TOOLS_BEHIND = (
    "<|im_start|>system\n{{ messages[0].content }}\n\n# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n" + LATER
)
TOOLS_BEFORE = (
    "<|im_start|>system\nYou may call:\n\n"
    "{% for tool in tools %}## {{ tool.function.name }}\n{{ tool.function | tojson(indent=4) }}\n\n"
    "{% endfor %}{{ messages[0].content }}<|im_end|>\n" + LATER
)
TOOL_TEMPLATES = {"behind": TOOLS_BEHIND, "before": TOOLS_BEFORE}
FIELD_TEMPLATES = {
    "xml": "<|im_start|>system\n<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>\n"
    "<description>{{ t.function.description }}</description>\n<parameters>"
    "{% for name, p in t.function.parameters.properties.items() %}\n<parameter>\n<name>{{ name }}</name>\n"
    "<type>{{ p.type }}</type>\n<description>{{ p.description }}</description>\n</parameter>{% endfor %}"
    "\n</parameters>\n</function>{% endfor %}\n</tools><|im_end|>\n",
    "types": "<|im_start|>system\nnamespace functions {\n"
    "{% for t in tools %}\n// {{ t.function.description }}\n"
    "type {{ t.function.name }} = (_: {\n"
    "{% for name, p in t.function.parameters.properties.items() %}"
    "// {{ p.description }}\n{{ name }}: string,\n"
    "{% endfor %}}) => any;\n{% endfor %}}<|im_end|>\n",
}
DOCUMENTS = (
    "<|im_start|>system\nUse these:\n"
    "{% for d in documents %}Document [{{ loop.index }}] {{ d.title }} (score {{ d.score }})\n"
    "{{ d.text }}\n\n{% endfor %}<|im_end|>\n" + MESSAGES
)
AS_JSON = "<|im_start|>system\n{% for d in documents %}{{ d | tojson }}\n{% endfor %}<|im_end|>\n"
DOCUMENT_TEMPLATES = {"text": DOCUMENTS, "json": AS_JSON + MESSAGES}
QUESTION = {"role": "user", "content": "Why?"}
UNLIMITED = TokenizeParams(max_total_tokens=None, add_special_tokens=False)


class Asked(NamedTuple):
    ids: list[int]
    spans: list[tuple[int, int]]
    counts: dict[str, int]
    segments: list[tuple[int, ...]]
    texts: list[str]
    lead: str


class FrontEnd:
    """What a request goes through before the engine: vLLM's renderer in our mode, then the segment finder."""

    def __init__(self, path: Path, **segment: Any) -> None:
        segment = {"mode": "structure", "min_tokens": 32, "query_tokens": 16, "newest_tokens": 0, **segment}
        options = {"segment": segment, "min_segment_tokens": 16, "context": "none", "islands": "none"}
        self.renderers = []
        for mode in (TOKENIZER_MODE, "hf"):
            model = ModelConfig(model=str(path), tokenizer_mode=mode, dtype="float32", max_model_len=256)
            config = VllmConfig(model_config=model)
            if mode == TOKENIZER_MODE:
                connector = {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
                config.kv_transfer_config = KVTransferConfig(**connector, kv_connector_extra_config=options)
                self.finder = SegmentFinder(config)
            self.renderers.append(renderer_from_config(config))

    def prompts(self, messages: Any, template: str = MESSAGES, **template_args: Any) -> list[Any]:
        """What our renderer makes of a request, and what the stock one does."""
        params = ChatParams(chat_template=template, chat_template_kwargs={"tokenize": False, **template_args})
        return [r.render_chat([messages], params, UNLIMITED)[1][0] for r in self.renderers]

    def ask(self, messages: Any, template: str = MESSAGES, **template_args: Any) -> Asked:
        ours, stock = self.prompts(messages, template, **template_args)
        ids = ours["prompt_token_ids"]
        assert ids == stock["prompt_token_ids"] and CHAT not in stock
        return self.asked(ids, ours)

    @property
    def special(self) -> dict[int, str]:
        return self.finder._segments._vocabulary.special

    def asked(self, ids: list[int], prompt: Any, mode: str = "structure") -> Asked:
        found = self.finder.found(ids, mode, prompt)
        spans, counts = list(found.spans), {k: n for k, n in found.counts.items() if n}
        assert all(a <= b for a, b in pairwise([0, *(i for span in spans for i in span), len(ids) - 1]))
        ends = ("cut", "short", "unlocated", "overlapping", "unaligned", "surplus")
        assert counts.get("pieces", 0) == sum(counts.get(f"pieces_{end}", 0) for end in ends)
        read = self.finder._segments._vocabulary.texts.of(ids)
        texts = ["".join(read[start:stop]) for start, stop in spans]
        segments = [tuple(ids[start:stop]) for start, stop in spans]
        return Asked(ids, spans, counts, segments, texts, "".join(read[: spans[0][0]] if spans else read))

    def close(self) -> None:
        for renderer in self.renderers:
            renderer.shutdown()


@pytest.fixture(scope="module")
def front_ends(tokenizer_dirs) -> Iterator[Callable[..., FrontEnd]]:
    made: dict[Any, FrontEnd] = {}

    def get(kind: str, **segment: Any) -> FrontEnd:
        key = (kind, *segment.items())
        if key not in made:
            made[key] = FrontEnd(tokenizer_dirs[kind], **segment)
        return made[key]

    yield get
    for front_end in made.values():
        front_end.close()


@pytest.fixture(params=USED)
def front_end(request, front_ends) -> FrontEnd:
    return front_ends(request.param)


def described(i: int) -> dict[str, Any]:
    """A tool with parameters that say what they are."""
    texts = [prose(f"parameter {i} {n}", 8) for n in range(4)]
    properties = {f"p{n}": {"type": "string", "description": text} for n, text in enumerate(texts)}
    function = {"name": f"tool{i}", "description": prose(f"tool {i}", 30)}
    return {"type": "function", "function": function | {"parameters": {"properties": properties}}}


def tool(i: int, words: int = 60) -> dict[str, Any]:
    said = {"name": f"tool{i}", "description": prose(f"tool {i}", words) + ' "naïve"'}
    properties = {"where": {"type": "string", "description": f"a place {i}"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {**said, "parameters": parameters}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("where", TOOL_TEMPLATES)
def test_tools_have_the_same_segments_in_every_order(front_end: FrontEnd, where: str) -> None:
    tools = [tool(i) for i in range(6)]
    system = {"role": "system", "content": prose("system", 50)}

    def ask(*order: int) -> Asked:
        return front_end.ask([system, QUESTION], TOOL_TEMPLATES[where], tools=[tools[i] for i in order])

    whole, moved, fewer = ask(*range(6)), ask(3, 5, 0, 4, 2, 1), ask(5, 0, 3, 1)
    system_segments = int(where == "before")
    assert len(whole.spans) == len(moved.spans) == 6 + system_segments
    assert set(whole.segments) == set(moved.segments) > set(fewer.segments)
    assert len(fewer.spans) == 4 + system_segments
    assert (system["content"] in whole.lead) == (where == "behind")
    assert all(f'"tool{i}"' in whole.texts[i] for i in range(6))


@pytest.mark.parametrize("how", FIELD_TEMPLATES)
def test_tools_written_field_by_field_are_found_by_their_texts(front_end: FrontEnd, how: str) -> None:
    tools = [described(i) for i in range(6)]
    found = [
        front_end.ask([QUESTION], FIELD_TEMPLATES[how] + MESSAGES, tools=[tools[i] for i in order])
        for order in (range(6), (3, 5, 0, 4, 2, 1), (5, 0, 3, 1))
    ]
    assert len(found[0].spans) == len(found[1].spans) == 6 and len(found[2].spans) == 4
    assert set(found[0].segments) == set(found[1].segments) > set(found[2].segments)
    last = tools[0]["function"]["parameters"]["properties"]["p3"]["description"]
    assert last[:-12] in found[0].texts[0] and tools[0]["function"]["description"] in found[0].texts[0]


@pytest.mark.parametrize("how", DOCUMENT_TEMPLATES)
def test_numbers_and_scores_are_in_no_segment(front_end: FrontEnd, how: str) -> None:
    documents = [{"title": f"T{i}", "text": prose(i, 60) + '\nAnd "more".'} for i in range(5)]

    def ask(*order: int) -> Asked:
        scored = [{**documents[i], "score": f"0.{n}{i}"} for n, i in enumerate(order)]
        return front_end.ask([QUESTION], DOCUMENT_TEMPLATES[how], documents=scored)

    found = [ask(*order) for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (1, 4))]
    assert len(found[0].spans) == 5 and set(found[0].segments) == set(found[1].segments)
    assert set(found[2].segments) < set(found[0].segments) and len(found[2].spans) == 2
    assert not any("score" in text or "Document [" in text for text in found[0].texts)


def test_parts_of_a_message_are_segments_but_for_the_question(front_end: FrontEnd) -> None:
    question = f"Which? {prose('question', 10)}"
    contents = (parts(*(prose(i, 60) for i in order), question) for order in ((0, 1, 2, 3), (3, 1, 0, 2)))
    found = [front_end.ask([{"role": "user", "content": content}]) for content in contents]
    assert len(found[0].spans) == 4 and set(found[0].segments) == set(found[1].segments)
    assert not any("Which?" in text for text in found[0].texts)


@pytest.mark.parametrize("marker", ["cache_control", "prompt_cache_breakpoint"])
def test_a_marked_part_is_no_question(front_ends, marker: str) -> None:
    """Nor is it cut: by itself it would be a text whose paragraphs are."""
    front_end = front_ends("qwen")
    text = "\n\n".join(prose(i, 50) for i in range(3))
    marked = {"type": "text", "text": text, marker: {"type": "ephemeral"}}
    said = front_end.ask([{"role": "user", "content": [marked]}])
    assert len(said.spans) == 1 and said.texts[0].startswith(text[:-20])
    assert len(front_end.ask([{"role": "user", "content": parts(text)}]).spans) > 1


def test_parts_and_markers_pass_vllms_own_request(front_ends) -> None:
    """Its contents may be read once, and its parts may say more than OpenAI's."""
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [part | mark for part in parts(*(prose(i, 60) for i in range(3)))]
    body = {"model": "m", "messages": [{"role": "user", "content": content}, QUESTION]}
    for _ in range(2):
        said = front_ends("qwen").ask(ChatCompletionRequest.model_validate(body).messages)
        assert len(said.spans) == 3


def test_tool_results_stay_when_the_chat_goes_on(front_end: FrontEnd) -> None:
    result = {"role": "tool", "content": f"{prose(1, 60)}\n\n{prose(2, 60)}", "tool_call_id": "a"}
    begun = front_end.ask([QUESTION, result])
    longer = front_end.ask([QUESTION, result, {"role": "assistant", "content": prose(3, 60)}, QUESTION])
    assert len(begun.spans) == 1 and len(longer.spans) == 2 and longer.segments[0] == begun.segments[0]


def test_a_message_of_one_text_is_cut_by_patterns(front_end: FrontEnd) -> None:
    text = "\n\n".join([*(prose(i, 60) for i in range(4)), "Why?"])
    for content in (text, parts(text)):
        said = front_end.ask([{"role": "user", "content": content}])
        assert len(said.spans) == 4
    by_text = front_end.finder.found(said.ids, "text", None)
    assert set(said.segments) >= {tuple(said.ids[a:b]) for a, b in by_text.spans[1:]}


def test_short_tools_are_put_together_where_they_say(front_end: FrontEnd) -> None:
    tools = [tool(i, words=2) for i in range(40)]
    encode = front_end.renderers[0].get_tokenizer().encode
    least = max(len(encode(json.dumps(t))) for t in tools) + 10
    front_end = FrontEnd(Path(front_end.finder._checker.vllm_config.model_config.model), min_tokens=least)
    whole = front_end.ask([QUESTION], TOOLS_BEHIND, tools=tools)
    assert 8 <= len(whole.spans) <= 20
    rng = random.Random(3)
    for _ in range(10):
        i, j = rng.sample(range(40), 2)
        for changed in (tools[:i] + tools[i + 1 :], [*tools[:j], tool(99, words=2), *tools[j:]]):
            said = front_end.ask([QUESTION], TOOLS_BEHIND, tools=changed)
            assert len(set(said.segments) - set(whole.segments)) <= 3
    front_end.close()


def test_without_a_question_the_last_part_is_a_piece_like_others(front_ends) -> None:
    content = parts(*(prose(i, 60) for i in range(3)))
    asked = [{"role": "user", "content": content}]
    found, all_of_it = (front_ends("qwen", query_tokens=n).ask(asked) for n in (48, 0))
    assert len(all_of_it.spans) == 3 and found.spans[:2] == all_of_it.spans[:2]
    asked_for, rest = (content[-1]["text"].replace(f.texts[-1].strip(), "") for f in (found, all_of_it))
    assert len(asked_for.split()) >= 8 and len(rest.split()) == 1


class TestBadInput:
    """Each has a documented result, and none is an error."""

    @pytest.fixture
    def front_end(self, front_ends) -> FrontEnd:
        return front_ends("qwen")

    def test_documents_that_hold_another(self, front_end: FrontEnd) -> None:
        inner = prose("inner", 60)
        outer = f"{prose('outer', 30)} {inner} {prose('end', 30)}"
        for order in ([inner, outer], [outer, inner]):
            documents = [{"title": "t", "score": 1, "text": text} for text in order]
            said = front_end.ask([QUESTION], DOCUMENTS, documents=documents)
            assert len(said.spans) == 2 and said.counts["pieces_cut"] == 2
        nested = [{"title": "t", "score": 1, "text": outer, "snippet": inner}]
        said = front_end.ask([QUESTION], DOCUMENTS, documents=nested)
        assert len(said.spans) == 1 and said.counts["pieces_overlapping"] == 1

    def test_empty_and_short_pieces(self, front_end: FrontEnd) -> None:
        content = parts("", " ", "a", "\n", "é", *["Yes."] * 50, prose(1, 60), "Why?")
        said = front_end.ask([{"role": "user", "content": content}])
        assert len(said.spans) == 1 and said.counts["pieces_short"] == 55

    def test_thousands_of_pieces(self, front_end: FrontEnd) -> None:
        content = parts(*(prose(i, 25) for i in range(5000)))
        said = front_end.ask([{"role": "user", "content": content}])
        assert len(said.spans) == 256 and said.counts["pieces_surplus"] > 4000

    def test_pieces_that_the_template_changes(self, front_end: FrontEnd) -> None:
        """What it leaves as it is is found; what it does not write is not looked for without end."""
        template = MESSAGES.replace("m.content", "m.content | replace('fox', 'FOX') | trim")
        texts = [prose(i, 60).replace("Fox", "fox") for i in range(6)]
        kept = [text.replace("fox", "dog") for text in texts[:3]]
        said = front_end.ask([{"role": "user", "content": parts(*kept, *texts[3:], "Why?")}], template)
        assert len(said.spans) == 3 and said.counts["pieces_unlocated"] == 3
        unwritten = [{"text": prose(i, 60)} for i in range(3 * MAX_MISSED)]
        said = front_end.ask([QUESTION], documents=unwritten)
        assert said.counts == {"pieces": 3 * MAX_MISSED, "pieces_unlocated": 3 * MAX_MISSED}

    def test_a_prompt_that_was_cut(self, front_end: FrontEnd) -> None:
        """Its pieces are looked for in what is left of it."""
        content = parts(*(prose(i, 60) for i in range(4)), "Why?")
        prompt, _ = front_end.prompts([{"role": "user", "content": content}])
        ids = prompt["prompt_token_ids"]
        whole, cut = front_end.asked(ids, prompt), front_end.asked(ids[len(ids) // 3 :], prompt)
        assert len(whole.spans) == 4 and 1 <= len(cut.spans) < 4 and set(cut.segments) < set(whole.segments)

    def test_values_of_any_type(self, front_end: FrontEnd) -> None:
        endless: dict[str, Any] = {"type": "function"}
        endless["function"] = endless
        odd = [None, 7, "text", [], {}, {"text": 3}, {"text": "\ud800" * 200}, {"function": "x"}, print]
        for value in (None, 7, "x" * 200, {"a": 1}, odd, [endless], [{"x": {1, 2}}]):
            prompt, _ = front_end.prompts([QUESTION])
            for messages in (odd, [{"role": "user", "content": value}], [{"role": value, "content": odd}]):
                prompt[CHAT] = Chat(messages, tools=value, documents=value)
                assert not front_end.asked(prompt["prompt_token_ids"], prompt).spans

    def test_prompts_without_a_chat(self, front_end: FrontEnd) -> None:
        """They are cut as by text, whatever they were made of."""
        text = "\n\n".join(["Answer.", *(prose(i, 60) for i in range(4)), "Why?"])
        ids = front_end.renderers[0].get_tokenizer().encode(text)
        by_text = front_end.finder.found(ids, "text", None).spans
        for prompt in (text, {"prompt": text}, {"type": "token", "prompt_token_ids": ids}, None):
            assert front_end.finder.found(ids, "structure", prompt).spans == by_text


SNIPPETS = st.text(st.sampled_from('ab .\n"\\{}<|é東👍\u0301\t'), max_size=60)


@given(
    st.lists(st.lists(SNIPPETS, min_size=1, max_size=5), min_size=1, max_size=4),
    st.sampled_from(USED),
    st.sampled_from([0, 16]),
)
def test_any_request_has_stocks_ids_and_disjoint_segments(
    front_ends, messages: list[list[str]], kind: str, question: int
) -> None:
    said = [{"role": "user", "content": parts(*texts)} for texts in messages]
    tools = [{"type": "function", "function": {"name": "f", "description": text}} for text in messages[0]]
    found = front_ends(kind, min_tokens=4, query_tokens=question).ask(said, TOOLS_BEHIND, tools=tools)
    if found.spans:
        assert found.counts["segment_tokens"] == sum(stop - start for start, stop in found.spans)


@given(SNIPPETS, st.sampled_from(USED))
def test_lengths_of_tokens_say_where_they_begin(front_ends, text: str, kind: str) -> None:
    front_end = front_ends(kind)
    tokenizer = front_end.renderers[0].get_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = front_end.finder._segments._vocabulary.lengths.starts(ids, len(text.encode()))
    assert starts is not None or kind not in ("gpt2", "llama3")
    if starts is None:
        return
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    begins = [0, *accumulate(len(c.encode()) for c in text)]
    for start, (first, last) in zip(starts, offsets, strict=False):
        assert begins[first] <= start <= begins[last], "inside a character it is said to begin with it"


@pytest.mark.parametrize(
    ("tokens", "block", "moved"),
    [
        (["Say:", " One", " two", " end"], (1, 3), 0),  # the space before a word is the word's
        (["Say:", " ", "One", " two", " end"], (2, 4), 0),
        (["Say: O", "ne", " two", " end"], (1, 3), 1),  # another text's token
        (["Say:", " On", "e two", " end"], (1, 3), 0),
    ],
)
def test_a_piece_begins_with_the_token_that_its_first_word_begins(
    tokens: list[str], block: tuple[int, int], moved: int
) -> None:
    text = "".join(tokens).encode()
    messages = [{"role": "user", "content": [{"type": "text", "text": "One two end"}, {"text": "Why?"}]}]
    found = locate(Chat(messages), text, [0, *accumulate(map(len, tokens))], least=4)
    assert [(b.start, b.stop) for b in found.blocks] == [block]
    assert found.counts["moved"] == moved


@pytest.mark.slow
def test_cost_of_16k_tokens(smollm2: Path) -> None:
    """``pytest -s -k cost`` prints the times of docs/how-to/without-separators.md.

    The bound is one of a busy machine.
    """
    front_end = FrontEnd(smollm2, min_tokens=128, query_tokens=128)
    tools = [tool(i, words=110) for i in range(62)]
    documents = [prose(i, 1300) for i in range(7)]
    system = {"role": "system", "content": "Be brief."}
    asked: dict[str, tuple[list[Any], list[Any]]] = {
        "62 tools": ([system, QUESTION], tools),
        "7 parts": ([system, {"role": "user", "content": parts(*documents, "Why?")}], []),
        "30 tools, 4 tool results": (
            [system, QUESTION, *({"role": "tool", "tool_call_id": "a", "content": d} for d in documents[:4])],
            tools[:30],
        ),
        "one text": ([system, {"role": "user", "content": "\n\n".join([*documents, "Why?"])}], []),
    }
    for name, (messages, told) in asked.items():
        prompt, _ = front_end.prompts(messages, TOOLS_BEHIND, tools=told)
        ids, times = prompt["prompt_token_ids"], []
        assert front_end.asked(ids, prompt).counts["segment_tokens"] > 0.9 * len(ids)
        for _ in range(200):
            begun = perf_counter()
            front_end.finder.found(ids, "structure", prompt)
            times.append(1000 * (perf_counter() - begun))
        print(f"{name}: {len(ids)} tokens, median {median(times):.2f} ms, least {min(times):.2f} ms")
        assert min(times) < 20
    front_end.close()


def test_mode_off_leaves_requests_alone(smollm2: Path) -> None:
    """The tokens are stock's, and the request says nothing of segments."""
    front_end = FrontEnd(smollm2, mode="off")
    messages = [{"role": "user", "content": parts(*(prose(i, 1300) for i in range(7)), "Why?")}]
    params = ChatParams(chat_template=TOOLS_BEHIND, chat_template_kwargs={"tokenize": False, "tools": []})
    ours, stock = (r.render_chat([messages], params, UNLIMITED)[1][0] for r in front_end.renderers)
    ids = ours["prompt_token_ids"]
    asked = EngineCoreRequest("", ids, None, SamplingParams(), None, 0.0, None, None, None)
    front_end.finder.receive(asked, ours)
    assert ids == stock["prompt_token_ids"] and asked.sampling_params.extra_args is None
    front_end.close()
