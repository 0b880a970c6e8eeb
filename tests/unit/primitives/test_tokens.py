"""Texts and ids of the primitives, cutting, the prompt builders, and the fixed text before records."""

import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from vllm_hypic.primitives.builder import build_messages, build_prompt, build_prompt_ids
from vllm_hypic.primitives.context import context_text, context_tokens
from vllm_hypic.primitives.tokens import Marker, PrimitiveIds, PrimitiveTexts, split_ids, split_text

from .conftest import gpt2

TEXTS = PrimitiveTexts()
IDS = PrimitiveIds(sep=100, pdep=101, pad=102)
prompt_ids = partial(build_prompt_ids, ids=IDS)

short_texts = st.text(alphabet="ab<|>", min_size=1, max_size=3)


def test_json_round_trip_and_its_errors():
    texts = PrimitiveTexts(sep="<<PIC_SEP>>", pad="é")
    assert PrimitiveTexts.from_json(texts.to_json()) == texts
    assert PrimitiveTexts.from_json('{"sep": "S"}') == PrimitiveTexts(sep="S")
    for damaged in ("{", "[]", '{"seperator": "x"}', '{"sep": ""}'):
        with pytest.raises(ValueError, match=r"token primitives|non-empty"):
            PrimitiveTexts.from_json(damaged)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrimitiveTexts(sep=""), "sep='': expected a non-empty string"),
        (lambda: PrimitiveTexts(pad=None), "pad=None: expected a non-empty string"),
        (lambda: PrimitiveTexts(pdep=3), "pdep=3: expected a non-empty string"),
        (lambda: PrimitiveTexts(sep="x", pad="x"), "sep='x': pad has the same text; the texts must differ"),
        (lambda: PrimitiveTexts("<<PIC", pad="<<PIC_SEP>>"), "sep='<<PIC': is part of pad='<<PIC_SEP>>'"),
        (lambda: PrimitiveTexts(literal="no"), "literal='no': expected true or false"),
        (lambda: PrimitiveTexts(sep="\ud800"), "sep='\\ud800': not valid Unicode text"),
        (lambda: PrimitiveIds(-1, 1, 2), "sep=-1: expected a token id"),
        (lambda: PrimitiveIds(True, 1, 2), "sep=True: expected a token id"),
        (lambda: PrimitiveIds(7, 7, 2), "must differ"),
    ],
)
def test_bad_texts_and_ids_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@given(
    st.lists(st.one_of(st.sampled_from(Marker), short_texts)),
    st.sampled_from([TEXTS, PrimitiveTexts("<|>", "a|", "bb")]),
)
def test_split_text_loses_nothing_and_leaves_no_marker_in_a_text(parts, texts):
    text = "".join(texts[p] if isinstance(p, Marker) else p for p in parts)
    found = split_text(text, texts)
    assert "".join(texts[p] if isinstance(p, Marker) else p for p in found) == text
    assert all(p and not texts.contains(p) for p in found if isinstance(p, str))
    assert all(isinstance(a, Marker) or isinstance(b, Marker) for a, b in pairwise(found))


def test_split_text_leftmost_match_wins():
    texts = PrimitiveTexts(sep="ab", pdep="bc", pad="~")
    assert split_text("abc", texts) == [Marker.SEP, "c"]


@given(st.lists(st.integers(98, 104)))
def test_split_ids_loses_nothing(ids):
    found = split_ids(ids, IDS)
    assert [t for p in found for t in ([IDS[p]] if isinstance(p, Marker) else p)] == ids
    assert all(not IDS.contains(p) for p in found if not isinstance(p, Marker))
    assert IDS.contains(ids) == any(isinstance(p, Marker) for p in found)


def test_marker_of_an_id():
    assert [IDS.marker(t) for t in (*IDS, 99)] == [Marker.SEP, Marker.PDEP, Marker.PAD, None]


def test_build_prompt_joins_with_separators():
    assert (
        build_prompt(system="S", segments=["a", "b"], query="q")
        == "S<|hypic_sep|>a<|hypic_sep|>b<|hypic_sep|>q"
    )
    # Without a system part the first document must not become the leading segment.
    assert split_text(build_prompt(segments=["a"], query="q"), TEXTS) == [Marker.SEP, "a", Marker.SEP, "q"]
    # Without a query the prompt ends in a separator: it warms its segments.
    assert split_text(build_prompt(segments=["a"]), TEXTS) == [Marker.SEP, "a", Marker.SEP]


def test_build_messages():
    texts = PrimitiveTexts(sep="|||")
    messages = build_messages(system="S", documents=("a", "b"), question="q", texts=texts)
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "|||a|||b|||q"}]
    assert build_messages(documents=["a"], question="q", texts=texts)[0]["role"] == "user"


def test_build_prompt_ids():
    prompt = build_prompt_ids(system=[1, 2], segments=[[3], np.array([4, 5])], query=(6,), ids=IDS)
    assert prompt == [1, 2, 100, 3, 100, 4, 5, 100, 6]
    assert all(type(token) is int for token in prompt)
    assert build_prompt_ids(segments=[[3]], ids=IDS) == [100, 3, 100]


@pytest.mark.parametrize(
    ("build", "given", "error", "message"),
    [
        (build_prompt, {"segments": "abc"}, TypeError, "segments: expected a list of texts, got str"),
        (build_prompt, {"segments": ["a", 3]}, TypeError, "segments[1]: expected text (str), got int"),
        (build_prompt, {"segments": ["a", ""]}, ValueError, "segments[1] is empty"),
        (build_prompt, {"segments": ["x<|hypic_pad|>"]}, ValueError, "segments[0] contains '<|hypic_pad|>'"),
        (build_prompt, {"segments": ["x"], "query": "<|hypic_sep|>"}, ValueError, "query contains"),
        (build_messages, {"documents": ["x", ""], "question": ""}, ValueError, "documents[1] is empty"),
        (build_messages, {"documents": ["x"], "question": TEXTS.sep}, ValueError, "question contains"),
        (build_messages, {"documents": ["x"], "system": b"s"}, TypeError, "system: expected text"),
        (prompt_ids, {"segments": ["ab"]}, TypeError, "segments[0]: expected a list"),
        (prompt_ids, {"segments": [3]}, TypeError, "segments[0]: expected a list"),
        (prompt_ids, {"segments": "ab"}, TypeError, "segments: expected a list"),
        (prompt_ids, {"segments": [[1.5]]}, TypeError, "segments[0][0]=1.5"),
        (prompt_ids, {"segments": [[-1]]}, ValueError, "segments[0][0]=-1"),
        (prompt_ids, {"segments": [[]]}, ValueError, "segments[0] is empty"),
        (prompt_ids, {"segments": [[1, 100]]}, ValueError, "is the id of sep"),
    ],
)
def test_builders_refuse_with_the_place(build, given, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build(**given)


CHAT = "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}[end]\n{% endfor %}"


def test_the_plugin_brings_a_text() -> None:
    text = context_text(None)
    assert len(text) > 1000 and text == text.strip()


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "context.txt"
    path.write_text("  One page.\n", encoding="utf-8")
    assert context_text(str(path)) == "One page."
    path.write_text(" \n")
    with pytest.raises(ValueError, match="expected a text, but the file is empty"):
        context_text(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="context_file="):
        context_text(str(path))


@pytest.mark.parametrize(
    ("template", "begins"),
    [(CHAT, "[user]\nOne page."), (None, "One page."), ("{{ messages[0]['content'] | upper }}", "One page.")],
    ids=["chat", "none", "unusable"],
)
def test_it_begins_the_user_turn_or_the_prompt_and_ends_neither(template: str | None, begins: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=gpt2(False))
    tokenizer.chat_template = template
    assert context_tokens(tokenizer, "One page.") == tuple(tokenizer.encode(begins))
