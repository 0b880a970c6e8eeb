"""Texts and ids of the primitives, cutting, and the prompt builders."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hypic.primitives.builder import build_messages, build_prompt, build_prompt_ids
from vllm_hypic.primitives.tokens import Marker, PrimitiveIds, PrimitiveTexts, split_ids, split_text

TEXTS = PrimitiveTexts()
IDS = PrimitiveIds(sep=100, pdep=101, pad=102)

short_texts = st.text(alphabet="ab<|>", min_size=1, max_size=3)


def test_primitives_package_imports_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_hypic.primitives.builder, vllm_hypic.primitives.tokens;"
        "print([m for m in ('torch', 'vllm', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"sep": ""}, "sep='': expected a non-empty string"),
        ({"pad": None}, "pad=None: expected a non-empty string"),
        ({"pdep": 3}, "pdep=3: expected a non-empty string"),
        ({"sep": "x", "pad": "x"}, "sep='x': pad has the same text; the three must differ"),
        ({"sep": "<<PIC", "pad": "<<PIC_SEP>>"}, "sep='<<PIC': is part of pad='<<PIC_SEP>>'"),
        ({"literal": "no"}, "literal='no': expected true or false"),
        ({"sep": "\ud800"}, "sep='\\ud800': not valid Unicode text"),
    ],
)
def test_bad_texts_are_refused_by_name(texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PrimitiveTexts(**texts)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"sep": -1, "pdep": 1, "pad": 2}, "sep=-1: expected a token id"),
        ({"sep": True, "pdep": 1, "pad": 2}, "sep=True: expected a token id"),
        ({"sep": 7, "pdep": 7, "pad": 2}, "must differ"),
    ],
)
def test_bad_ids_are_refused_by_name(ids, message):
    with pytest.raises(ValueError, match=message):
        PrimitiveIds(**ids)


def test_json_round_trip_and_its_errors():
    texts = PrimitiveTexts(sep="<<PIC_SEP>>", pad="é")
    assert PrimitiveTexts.from_json(texts.to_json()) == texts
    assert PrimitiveTexts.from_json('{"sep": "S"}') == PrimitiveTexts(sep="S")
    for damaged in ("{", "[]", '{"seperator": "x"}', '{"sep": ""}'):
        with pytest.raises(ValueError, match=r"token primitives|non-empty"):
            PrimitiveTexts.from_json(damaged)


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


# -- builders ----------------------------------------------------------------


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
    ("call", "error", "message"),
    [
        (lambda: build_prompt(segments="abc"), TypeError, "segments: expected a list of texts, got str"),
        (
            lambda: build_prompt(segments=["a", 3]),
            TypeError,
            r"segments\[1\]: expected text \(str\), got int",
        ),
        (lambda: build_prompt(segments=["a", ""]), ValueError, r"segments\[1\] is empty"),
        (
            lambda: build_prompt(segments=["x<|hypic_pad|>"]),
            ValueError,
            r"segments\[0\] contains '<\|hypic_pad\|>'",
        ),
        (lambda: build_prompt(segments=["x"], query="<|hypic_sep|>"), ValueError, "query contains"),
        (lambda: build_messages(documents=["x", ""], question=""), ValueError, r"documents\[1\] is empty"),
        (lambda: build_messages(documents=["x"], question="<|hypic_sep|>"), ValueError, "question contains"),
        (lambda: build_messages(documents=["x"], system=b"s"), TypeError, "system: expected text"),
        (lambda: build_prompt_ids(segments=["ab"], ids=IDS), TypeError, r"segments\[0\]: expected a list"),
        (lambda: build_prompt_ids(segments=[3], ids=IDS), TypeError, r"segments\[0\]: expected a list"),
        (lambda: build_prompt_ids(segments="ab", ids=IDS), TypeError, "segments: expected a list"),
        (lambda: build_prompt_ids(segments=[[1.5]], ids=IDS), TypeError, r"segments\[0\]\[0\]=1.5"),
        (lambda: build_prompt_ids(segments=[[-1]], ids=IDS), ValueError, r"segments\[0\]\[0\]=-1"),
        (lambda: build_prompt_ids(segments=[[]], ids=IDS), ValueError, r"segments\[0\] is empty"),
        (lambda: build_prompt_ids(segments=[[1, 100]], ids=IDS), ValueError, "is the id of sep"),
    ],
)
def test_builders_refuse_with_the_place(call, error, message):
    with pytest.raises(error, match=message):
        call()
