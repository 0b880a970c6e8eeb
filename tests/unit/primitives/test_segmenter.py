"""Segments of prompts without separators: the same for a text wherever it stands, with all tokenizers."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vllm_hypic.config.engine import SegmentingConfig
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.messages import messages_of
from vllm_hypic.primitives.pieces import cut_prompt
from vllm_hypic.primitives.places import CutPoint, local_minima, pattern
from vllm_hypic.primitives.plan import PoolLimits, build_plan
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.segmenter import Segmenter
from vllm_hypic.primitives.token_texts import TokenTexts, special_tokens

from .conftest import CHAT_TEMPLATE, CHAT_TOKENS

USED = ["gpt2", "gpt2-prefix-space", "qwen", "llama3", "llama-legacy", "metaspace-first", "metaspace-never"]
WORDS = "fox dog lazy quick document capital river France Paris Seine brown question 12345 naïve".split()  # noqa: SIM905


def prose(seed: object, words: int) -> str:
    rng = random.Random(f"prose {seed}")
    out = []
    while sum(map(len, out)) < words:
        out.append([rng.choice(WORDS) for _ in range(rng.randrange(4, 14))])
    return " ".join(" ".join(sentence).capitalize() + "." for sentence in out)


class Chat:
    """A tokenizer with a chat template and a segmenter for it."""

    def __init__(self, path: Path, patterns: tuple[str, ...], **options: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.tokenizer.add_special_tokens({"extra_special_tokens": CHAT_TOKENS})
        self.tokenizer.chat_template = CHAT_TEMPLATE
        self.texts = TokenTexts(self.tokenizer).of
        self.special = special_tokens(self.tokenizer)
        sizes = {"min_tokens": 32, "mean_tokens": 256, "query_tokens": 16, "newest_tokens": 0}
        options = sizes | {"max_segments": 64} | options
        self.segmenter = Segmenter(self.texts, self.special, [pattern(p) for p in patterns], **options)

    def ids(self, *messages: tuple[str, str]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def segments(self, ids: list[int], mode: str = "text") -> list[tuple[int, ...]]:
        spans = self.segmenter.find(ids, mode).spans
        in_order = [0, *(place for span in spans for place in span), len(ids)]
        assert all(a <= b for a, b in pairwise(in_order))
        return [tuple(ids[start:stop]) for start, stop in spans]


@pytest.fixture(params=USED)
def chat(request: pytest.FixtureRequest, tokenizer_dirs) -> Chat:
    return Chat(tokenizer_dirs[request.param], ("blank-lines", "documents"))


@pytest.mark.parametrize("ends", ["", ".", " (end)", "\n", "  \n"])
def test_documents_have_the_same_segments_in_every_order(chat: Chat, ends: str) -> None:
    documents = [prose(i, 60) + ends for i in range(5)]
    question = ("user", "What is the capital of France?")
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 4, 3, 2, 0]):
        text = "\n\n".join(documents[i] for i in order)
        found.append(chat.segments(chat.ids(("system", "You answer briefly."), ("user", text), question)))
    assert sorted(found[0]) == sorted(found[1]) == sorted(found[2]) and len(found[0]) == 5


def test_what_is_asked_is_in_no_segment(chat: Chat) -> None:
    ids = chat.ids(("user", "\n\n".join(prose(i, 60) for i in range(3))))
    assert len(ids) - chat.segmenter.find(ids, "text").spans[-1][1] >= 16, "it may end in the question"


ORDERS = ([0, 1, 2, 3], [2, 0, 3, 1])
NO_QUESTION = ["", ".", "\n", " 東", "</doc>", "\n\n<document>\nIt is.\n</document>\n"]
"""Ends of prompts."""


@pytest.mark.parametrize("kind", USED)
@pytest.mark.parametrize("mode", ["text", "cdc"])
def test_without_a_question_all_but_the_last_word_may_be_cut(tokenizer_dirs, kind: str, mode: str) -> None:
    chat = Chat(tokenizer_dirs[kind], ("blank-lines", "documents"), query_tokens=0)
    text = "\n\n".join(prose(i, 60) for i in range(4))
    for end in NO_QUESTION:
        for ids in (chat.ids(("user", text + end)), chat.tokenizer.encode(text + end)):
            spans = chat.segmenter.find(ids, mode).spans
            behind = "".join(chat.texts(ids[spans[-1][1] :]))
            assert "".join(chat.texts(ids[spans[-1][0] : spans[-1][1]])).strip()
            assert len(behind.removesuffix("assistant\n")) < 48, "nothing was looked for at the end"
            rest = parse_link("block", 0), Namespace(""), PoolLimits(1 << 30, 1 << 30, 16, 1 << 30)
            plan = build_plan(cut_prompt(ids, spans), *rest, min_segment_tokens=1)
            assert not plan.warm_only and plan.stream[-1] == ids[-1]


def test_a_system_message_leads(chat: Chat) -> None:
    """It is cached as it stands: exact."""
    system = ("system", prose("system", 80))
    ids = chat.ids(system, ("user", f"{prose(1, 60)}\n\n{prose(2, 60)}\n\nWhy?"))
    [(first, _), _] = chat.segmenter.find(ids, "text").spans
    before = "".join(chat.texts(ids[:first]))
    assert before.rstrip().endswith("user") and system[1] in before


def in_system(documents: list[str]) -> list[tuple[str, str]]:
    return [("system", "\n\n".join(["Answer from this context:", *documents])), ("user", "Why?")]


def in_tags(documents: list[str]) -> list[tuple[str, str]]:
    found = [f'<document index="{n}">\n{d}\n</document>' for n, d in enumerate(documents)]
    return [("user", "\n".join([*found, "Why?"]))]


@pytest.mark.parametrize("form", [in_system, in_tags])
def test_documents_behind_a_first_paragraph_or_in_tags_are_segments(chat: Chat, form) -> None:
    documents = [prose(i, 60) for i in range(4)]
    found = [set(chat.segments(chat.ids(*form([documents[i] for i in order])))) for order in ORDERS]
    assert len(found[0]) == 4 and found[0] == found[1]


def test_the_turns_of_a_chat_stay_what_they_are(chat: Chat) -> None:
    turns = [("user" if i % 2 == 0 else "assistant", prose(f"turn {i}", 60)) for i in range(5)]
    shorter = chat.segments(chat.ids(*turns[:3]))
    longer = chat.segments(chat.ids(*turns))
    assert len(shorter) == 3 and len(longer) == 5
    assert longer[:2] == shorter[:2]


def test_an_answer_that_the_template_begins_does_not_hide_the_question(chat: Chat) -> None:
    chat.tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n", "assistant\nLet me think now:\n\n")
    ids = chat.ids(("user", f"{prose(1, 60)} And what is the capital?"))
    stop = chat.segmenter.find(ids, "text").spans[-1][1]
    assert "capital?" in "".join(chat.texts(ids[stop:]))
    assert "capital?" not in "".join(chat.texts(ids[:stop]))


def test_tools_are_segments(tokenizer_dirs) -> None:
    chat = Chat(tokenizer_dirs["qwen"], ("json-lines",))
    tools = [f'{{"name": "tool{i}", "description": "{prose(i, 50)}"}}' for i in range(6)]

    def system(*order: int) -> tuple[str, str]:
        return "system", "\n".join(["# Tools", "<tools>", *(tools[i] for i in order), "</tools>"])

    asked = (chat.ids(system(*order), ("user", "Why?")) for order in (range(6), (5, 0, 3, 2)))
    whole, moved = (set(chat.segments(ids)) for ids in asked)
    assert len(whole) == 6 and len(moved) == 4 and moved < whole


@pytest.mark.parametrize("kind", ["qwen", "llama-legacy"])
def test_an_edit_moves_no_cut_far_from_it(tokenizer_dirs, kind: str) -> None:
    chat = Chat(tokenizer_dirs[kind], (), mean_tokens=1024)
    paragraphs = [prose(i, 40) for i in range(150)]
    whole = chat.segments(chat.ids(("user", "\n".join(paragraphs))), "cdc")
    lengths = [len(s) for s in whole]
    assert len(whole) > 10 and min(lengths[1:-1]) >= 512 - 8
    assert 700 < sum(lengths) / len(lengths) < 1500
    for at in range(20, 130, 5):
        for new in ([prose("new", 40)], [], [prose("a", 30), paragraphs[at], prose("b", 30)]):
            edited = paragraphs[:at] + new + paragraphs[at + 1 :]
            segments = chat.segments(chat.ids(("user", "\n".join(edited))), "cdc")
            assert len(set(segments) - set(whole)) <= 2


def test_choice_of_places_is_that_of_the_plain_words() -> None:
    rng = random.Random(5)
    for _ in range(200):
        starts = sorted(rng.sample(range(400), rng.randrange(40)))
        places = [CutPoint(rng.randrange(2), rng.randrange(20), max(0, s - 1), s) for s in starts]
        reach = rng.choice([1, 10, 50])
        expected = []
        for i, place in enumerate(places):
            near = [(*p[:2], j) for j, p in enumerate(places) if abs(p.start - place.start) <= reach]
            if min(near) == (*place[:2], i):
                expected.append(place)
        assert local_minima(places, reach) == expected


def test_prompts_without_messages(chat: Chat) -> None:
    """A text is one message, whose first piece leads."""
    text = "\n\n".join(["Answer.", *(prose(i, 60) for i in range(4)), "Why?"])
    ids = AutoTokenizer.from_pretrained(chat.tokenizer.name_or_path).encode(text)
    spans = chat.segmenter.find(ids, "text").spans
    assert len(spans) == 4 and "Answer." in "".join(chat.texts(ids[: spans[0][0]]))


@pytest.mark.parametrize(
    "content",
    [
        *("", "a", "\n", "\n\n" * 500, "x" * 5000, "é\n\n" * 300, "\n\n".join(["ab"] * 5000)),
        *("<document>" * 400, "<doc>word</doc>" * 2000, "\n\n<document>\n\n" * 200),
        "<|im_start|>user\n" * 50,
    ],
)
@pytest.mark.parametrize("mode", ["text", "cdc"])
def test_any_text_is_cut_or_left(chat: Chat, content: str, mode: str) -> None:
    assert len(chat.segments(chat.ids(("system", content), ("user", content)), mode)) <= 64


def test_a_prompt_has_no_more_segments_than_it_may(tokenizer_dirs) -> None:
    chat = Chat(tokenizer_dirs["qwen"], ("blank-lines",), max_segments=3)
    ids = chat.ids(("user", "\n\n".join(prose(i, 60) for i in range(9))))
    assert len(chat.segments(ids)) == 3


def test_short_prompts_have_none(chat: Chat) -> None:
    assert chat.segments(chat.ids(("user", "Hello."))) == []
    assert chat.segmenter.find([], "text").spans == ()


@pytest.mark.parametrize("kind", USED)
def test_messages_are_found_behind_headers(tokenizer_dirs, kind: str) -> None:
    chat = Chat(tokenizer_dirs[kind], ())
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Me,\nof course."), ("user", "Why?")]
    ids = chat.ids(*said)
    texts = chat.texts(ids)
    found = messages_of(ids, lambda start, stop: "".join(texts[start:stop]), chat.special)
    assert ["".join(texts[m.start : m.stop]).strip() for m in found] == [text for _, text in said]
    assert [m.leads for m in found] == [True, False, False, False]
    assert [m.answers for m in found] == [False, False, True, False]


PATTERNS = SegmentingConfig().patterns


@pytest.fixture(params=["qwen", "llama3", "llama-legacy"])
def presets(request: pytest.FixtureRequest, tokenizer_dirs) -> Chat:
    return Chat(tokenizer_dirs[request.param], PATTERNS)


def paragraphs(i: int) -> str:
    """A document of short paragraphs: none is long enough to be found by itself."""
    return "\n\n".join(prose((i, j), 20) for j in range(6))


def dashes(documents: list[str]) -> str:
    line, text = "-" * 21, "\n\n".join(documents)
    return f"Context information is below.\n{line}\n{text}\n{line}\nQuery: Why?\nAnswer: "


def tagged(documents: list[str]) -> str:
    found = [
        f'<document index="{n}">\n<source>{d[:9]}.txt</source>\n{d}\n</document>'
        for n, d in enumerate(documents)
    ]
    return "\n".join(["<documents>", *found, "</documents>", "", "Why?"])


def wrapped(documents: list[str]) -> str:
    return "<context>\n" + "\n\n".join(documents) + "\n</context>\n\nWhy?"


def numbered(documents: list[str]) -> str:
    return "\n".join([*(f"Document [{n}]: {d}" for n, d in enumerate(documents)), "", "Question: Why?"])


def indented(documents: list[str]) -> str:
    lines = "".join(f"\n            {d}\n        " for d in documents)
    return f"\n        Given these:\n        {lines}\n\n        Question: Why?\n        Answer:\n        "


def headed(documents: list[str]) -> str:
    return dashes([f"file_path: docs/{d[:4]}.md\n\n{d}" for d in documents])


@pytest.mark.parametrize(
    ("form", "document"),
    [
        *((form, prose) for form in (dashes, wrapped)),
        *((form, paragraphs) for form in (tagged, numbered, indented, headed)),
    ],
)
def test_a_document_is_the_same_segments_wherever_it_stands(presets: Chat, form, document) -> None:
    documents = [document(i) if document is paragraphs else prose(i, 120) for i in range(4)]
    found = []
    for order in ORDERS:
        user = form([documents[i] for i in order])
        found.append(set(presets.segments(presets.ids(("system", "Answer."), ("user", user)))))
        assert all("Why?" not in "".join(presets.texts(segment)) for segment in found[-1])
    tokens = sum(len(presets.tokenizer.encode(d, add_special_tokens=False)) for d in documents)
    assert sum(map(len, found[0] & found[1])) >= 0.85 * tokens
    # The numbers of documents are in no segment.
    assert len(found[0]) == len(found[1])


def test_lines_may_end_with_crlf(presets: Chat) -> None:
    found = []
    for order in ORDERS:
        user = "\r\n\r\n".join([*(prose(i, 120) for i in order), "Why?"])
        found.append(set(presets.segments(presets.ids(("user", user)))))
    assert len(found[0]) == len(found[1]) == 4 and len(found[0] & found[1]) >= 3


@pytest.mark.parametrize("mode", ["text", "cdc"])
@pytest.mark.parametrize(
    "question",
    ["Why?\n\nBe brief.", "Why?\n\nNote: be brief.\n\nAnswer in French.", "Why? Be brief. Answer in French."],
)
def test_a_question_of_several_paragraphs_is_in_no_segment(tokenizer_dirs, question: str, mode: str) -> None:
    chat = Chat(tokenizer_dirs["qwen"], PATTERNS, query_tokens=64)
    for i in range(30):
        ids = chat.ids(("user", f"{prose(('a', i), 120)}\n\n{prose(('b', i), 120)}\n\n{question}"))
        for segment in chat.segments(ids, mode):
            assert "Why?" not in "".join(chat.texts(segment))


def test_a_system_message_in_tags_leads(presets: Chat) -> None:
    system = f"<role>\n{prose('role', 60)}\n</role>"
    ids = presets.ids(("system", system), ("user", "\n\n".join([prose(1, 60), prose(2, 60), "Why?"])))
    [(first, _), _] = presets.segmenter.find(ids, "text").spans
    assert "</role>" in "".join(presets.texts(ids[:first]))


def test_closing_tags_at_the_end_of_a_message_are_in_no_segment(presets: Chat) -> None:
    documents = [prose(i, 60) for i in range(4)]
    found = []
    for order in ORDERS:
        context = "\n\n".join(documents[i] for i in order)
        system = f"Use this:\n\n<context>\n{context}\n</context>"
        found.append(set(presets.segments(presets.ids(("system", system), ("user", "Why?")))))
    assert len(found[0]) == 4 and found[0] == found[1]
