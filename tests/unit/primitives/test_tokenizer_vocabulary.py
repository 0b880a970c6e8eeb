"""Texts and ids of the primitives in a vocabulary, literal texts, and what else reads the tokenizer."""

import copy
import json
import os
import pickle
import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, PythonBackend
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.tokenizers.registry import get_tokenizer

from vllm_hypic.cache_api.forms import Seal, id_form, own_seal
from vllm_hypic.config.engine import TOKENIZER_MODE
from vllm_hypic.engine.tokenizer import (
    COPIED_BY_RAY,
    TOKENS_ENV,
    HypicTokenizer,
    publish_texts,
    published_texts,
    with_primitives,
)
from vllm_hypic.primitives.builder import build_messages, build_prompt
from vllm_hypic.primitives.tokens import Marker, PrimitiveIds, PrimitiveTexts, primitive_ids, split_ids

from .test_tokenizer import alone, any_kind, around, load, texts

T = PrimitiveTexts()


@pytest.fixture
def clean_environment(monkeypatch):
    # publish_texts() writes the variable itself; monkeypatch restores what stood there before.
    monkeypatch.setenv(TOKENS_ENV, "")
    monkeypatch.setenv(COPIED_BY_RAY, "MINE")


def test_texts_come_from_the_environment(tokenizer_dirs, clean_environment):
    assert published_texts() == T
    texts = PrimitiveTexts(sep="<<PIC_SEP>>")
    publish_texts(texts)
    assert published_texts() == texts and os.environ[COPIED_BY_RAY] == f"MINE,{TOKENS_ENV}"
    # Not load(): it keeps what it made, and other tests want the usual texts.
    path = str(tokenizer_dirs["qwen"])
    tokenizer = get_tokenizer(path, tokenizer_mode=TOKENIZER_MODE, runner_type="generate")
    assert tokenizer.hypic_texts == texts
    assert tokenizer.encode("a<<PIC_SEP>>b")[1] == primitive_ids(tokenizer).sep
    assert not primitive_ids(tokenizer).contains(tokenizer.encode("a<|hypic_sep|>b"))


def test_publishing_other_texts_empties_vllms_tokenizer_cache(tokenizer_dirs, clean_environment):
    from vllm.tokenizers import cached_get_tokenizer

    path = str(tokenizer_dirs["qwen"])
    for sep in ("[S1]", "[S2]"):
        publish_texts(PrimitiveTexts(sep=sep))
        assert cached_get_tokenizer(path, tokenizer_mode=TOKENIZER_MODE).hypic_texts.sep == sep
    again = cached_get_tokenizer(path, tokenizer_mode=TOKENIZER_MODE)
    publish_texts(PrimitiveTexts(sep="[S2]"))
    assert cached_get_tokenizer(path, tokenizer_mode=TOKENIZER_MODE) is again


def test_a_damaged_variable_is_named(monkeypatch):
    monkeypatch.setenv(TOKENS_ENV, '{"sep": ""}')
    says = f"environment variable {TOKENS_ENV}: sep='': expected a non-empty string"
    with pytest.raises(ValueError, match=says):
        published_texts()


def test_a_token_of_the_vocabulary_keeps_its_id(tokenizer_dirs):
    texts = PrimitiveTexts(sep="<|im_end|>")
    stock = load(tokenizer_dirs["qwen"], "hf")
    tokenizer = HypicTokenizer.from_pretrained(str(tokenizer_dirs["qwen"]), primitive_texts=texts)
    assert primitive_ids(tokenizer).sep == stock.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) == len(stock) + 2
    assert tokenizer.get_vocab() == stock.get_vocab()
    assert copy.deepcopy(tokenizer).get_vocab() == stock.get_vocab()


AROUND = "itself puts this token around every text"


@pytest.mark.parametrize(
    ("kind", "texts", "message"),
    [
        ("qwen", {"sep": "Ġ"}, "sep='Ġ': the vocabulary uses this text for ' '"),
        ("qwen", {"pad": "<|im"}, "pad='<|im': part of the model's token '<|im_start|>'"),
        ("qwen", {"sep": "<|im_end|>", "literal": True}, "sep='<|im_end|>': the vocabulary holds this text"),
        ("bert", {"sep": "[SEP]"}, AROUND),
        ("llama-legacy", {"sep": "<s>"}, AROUND),
    ],
)
def test_texts_that_would_change_ordinary_text_are_refused(tokenizer_dirs, kind, texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HypicTokenizer.from_pretrained(str(tokenizer_dirs[kind]), primitive_texts=PrimitiveTexts(**texts))


def pieces_of(tokenizer, ids) -> list[list[int]]:
    return [p for p in split_ids(ids, primitive_ids(tokenizer)) if not isinstance(p, Marker)]


def test_demo_model_with_its_own_separator():
    path = Path(__file__).parents[3] / "examples/models/tiny-hybrid-qa/model"
    texts = PrimitiveTexts(sep="<sep>")
    tokenizer = HypicTokenizer.from_pretrained(str(path), primitive_texts=texts)
    stock = load(path, "hf")
    assert primitive_ids(tokenizer) == PrimitiveIds(sep=4, pdep=512, pad=513)
    texts = ["ent0 => ent1 .", "ent2 => ent3 .", "? ent0"]
    assert pieces_of(tokenizer, tokenizer.encode("<sep>".join(texts))) == [alone(stock, t) for t in texts]


def test_primitive_ids_of_other_tokenizers_point_the_way_out(tokenizer_dirs):
    with pytest.raises(ValueError, match="--tokenizer-mode hypic"):
        primitive_ids(load(tokenizer_dirs["qwen"], "hf"))
    with pytest.raises(ValueError, match=r"skip_tokenizer_init.*token_ids"):
        primitive_ids(None)
    with pytest.raises(ValueError, match="--tokenizer-mode hf"):
        with_primitives(object(), T)


def test_adding_twice_changes_nothing(tokenizer_dirs):
    once = copy.deepcopy(load(tokenizer_dirs["qwen"], TOKENIZER_MODE))
    twice = with_primitives(once, T)
    assert (primitive_ids(twice), len(twice)) == (primitive_ids(once), len(once))
    assert twice.get_vocab() == once.get_vocab()
    other = with_primitives(once, PrimitiveTexts(sep="[SEP]"))
    assert other.get_vocab() == once.get_vocab()
    assert other.encode("a[SEP]b", add_special_tokens=False)[1] == primitive_ids(other).sep == len(once)


class CharTokenizer(PythonBackend):
    """A Python tokenizer of single characters: BOS before a text, a mark before its first character."""

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, **kwargs):
        self.chars = {c: i for i, c in enumerate(["<s>", "<unk>", "▁", *map(chr, range(32, 127))])}
        super().__init__(bos_token="<s>", unk_token="<unk>", special_tokens_pattern="bos", **kwargs)

    @property
    def vocab_size(self):
        return len(self.chars)

    def get_vocab(self):
        return {**self.chars, **self.get_added_vocab()}

    def _tokenize(self, text, **kwargs):
        return ["▁", *text]

    def _convert_token_to_id(self, token):
        return self.chars.get(token, 1)

    def _convert_id_to_token(self, index):
        return {i: c for c, i in self.chars.items()}.get(index, "<unk>")

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).removeprefix("▁")


def test_slow_tokenizer():
    stock = CharTokenizer()
    ours = with_primitives(CharTokenizer(), T)
    assert not ours.is_fast
    for tokenizer in (ours, copy.copy(ours), copy.deepcopy(ours)):
        texts = ["one", "two words", " three", "why?"]
        ids = tokenizer.encode(T.sep.join(texts))
        assert ids[0] == stock.bos_token_id and stock.bos_token_id not in ids[1:]
        assert pieces_of(tokenizer, ids[1:]) == [alone(stock, t) for t in texts]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(texts)
        assert tokenizer.encode("plain text") == stock.encode("plain text")
        assert dict(tokenizer("plain text")) == dict(stock("plain text"))
        assert tokenizer.max_token_id == max(primitive_ids(tokenizer))


def _allowed(backend_cls, tokenizer, vocab_size: int, schema: str) -> set[int]:
    """Ids that a structured-output backend of vLLM allows after ``["``."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    options = SimpleNamespace(disable_any_whitespace=True, disable_additional_properties=False)
    unused = {"model_config": None, "speculative_config": None}
    config = SimpleNamespace(structured_outputs_config=options, **unused)
    backend = backend_cls(config, tokenizer=tokenizer, vocab_size=vocab_size)
    grammar = backend.compile_grammar(StructuredOutputOptions.JSON, schema)
    assert grammar.accept_tokens("r", tokenizer.encode('["', add_special_tokens=False))
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    return {i for i in range(vocab_size) if int(mask[0, i // 32]) >> (i % 32) & 1}


@pytest.mark.parametrize("model_rows", ["fewer", "more"])
@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_structured_output_allows_what_stock_allows(tokenizer_dirs, backend, model_rows):
    """Whether the model has rows for the added ids (padding of the vocabulary) or not."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    backend_cls = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}[backend]
    stock, ours = load(tokenizer_dirs["qwen"], "hf"), load(tokenizer_dirs["qwen"], TOKENIZER_MODE)
    vocab_size = len(stock) if model_rows == "fewer" else len(stock) + 64
    schema = json.dumps({"type": "array", "items": {"type": "string"}})
    found = _allowed(backend_cls, ours, vocab_size, schema)
    assert found == _allowed(backend_cls, stock, vocab_size, schema)
    assert len(found) > 50
    assert not found & set(primitive_ids(ours))


def test_outlines_vocabulary_is_stock(tokenizer_dirs):
    from vllm.v1.structured_output.utils import _reduced_vocabulary

    ours, stock = (_reduced_vocabulary(load(tokenizer_dirs["qwen"], mode)) for mode in (TOKENIZER_MODE, "hf"))
    assert {text: set(ids) for text, ids in ours.items()} == {text: set(ids) for text, ids in stock.items()}


def test_special_tokens_with_stripping_do_not_eat_a_segments_spaces(tokenizer_dirs):
    """A configured token of the vocabulary may strip the spaces beside it; the segments keep theirs."""
    plain = copy.deepcopy(load(tokenizer_dirs["gpt2"], "hf"))
    plain.add_special_tokens({"additional_special_tokens": [AddedToken("<cut>", lstrip=True, rstrip=True)]})
    tokenizer = with_primitives(plain, PrimitiveTexts(sep="<cut>"))
    found = pieces_of(tokenizer, tokenizer.encode("one <cut> two"))
    assert [tokenizer.decode(piece) for piece in found] == ["one ", " two"]


RAW = PrimitiveTexts(literal=True)
FORGED = f"<|hypic_tokens:{'0' * 32}:{own_seal().tokens([5]).rpartition(':')[2]}"
"""Looks like tokens that a process wrote."""
MARKS = [RAW.sep, RAW.pdep, RAW.pad, RAW.sep[:7], RAW.sep[7:], id_form("x"), FORGED, FORGED[:-9], "<|hypic_"]
few = settings(any_kind, max_examples=25)
hostile = st.lists(st.sampled_from(MARKS) | texts, max_size=8).map("".join)


@lru_cache
def load_literal(directory: Path) -> HypicTokenizer:
    return HypicTokenizer.from_pretrained(str(directory), primitive_texts=RAW)


@pytest.fixture
def stock(tokenizer_dirs, kind):
    return load(tokenizer_dirs[kind], "hf")


@pytest.fixture
def ours(tokenizer_dirs, kind):
    return load_literal(tokenizer_dirs[kind])


@few
@given(text=hostile, other=hostile)
def test_every_text_is_tokenised_as_without_the_plugin(stock, ours, text, other):
    ids = ours.encode(text)
    assert ids == stock.encode(text) and not ours.hypic_ids.contains(ids)
    assert ours([text, other])["input_ids"] == stock([text, other])["input_ids"]
    assert ours(text, other)["input_ids"] == stock(text, other)["input_ids"]
    assert ours.tokenize(text) == stock.tokenize(text)
    chat = [{"role": "user", "content": text}, {"role": "tool", "content": other}]
    assert ours.apply_chat_template(chat)["input_ids"] == stock.apply_chat_template(chat)["input_ids"]


@few
@given(segments=st.lists(hostile.filter(bool), min_size=1, max_size=3), query=hostile)
def test_what_this_process_writes_cuts_whatever_the_segments_say(stock, ours, segments, query):
    prompt = build_prompt(segments=segments, query=query, system="", texts=ours.prompt_texts)
    prefix, suffix = around(stock)
    sep = [ours.hypic_ids.sep]
    core = [token for segment in segments for token in (*sep, *alone(stock, segment))]
    assert ours.encode(prompt) == [*prefix, *core, *sep, *alone(stock, query), *suffix]


def test_chats_built_with_the_tokenizers_texts(stock, ours):
    messages = build_messages(documents=[f"one{RAW.sep}", "two"], question="?", texts=ours.prompt_texts)
    parts = split_ids(ours.apply_chat_template(messages)["input_ids"], ours.hypic_ids)
    assert [p for p in parts if isinstance(p, Marker)] == [Marker.SEP] * 3
    assert parts[2::2][:2] == [alone(stock, f"one{RAW.sep}"), alone(stock, "two")]


def test_copies_are_literal_too(ours):
    written = ours.prompt_texts.sep
    pooled = maybe_make_thread_pool(copy.copy(ours))
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), pooled):
        assert made.prompt_texts == ours.prompt_texts
        for text in (f"a{RAW.sep}b", f"a{written}b", "a"):
            assert made.encode(text) == ours.encode(text)


def test_ids_are_decoded_to_the_texts(ours):
    assert ours.decode([ours.hypic_ids.sep]) == RAW.sep
    assert ours.convert_ids_to_tokens([ours.hypic_ids.pad]) == [RAW.pad]


def test_another_processs_forms_are_text(stock, ours):
    foreign = Seal().texts(ours.hypic_ids).sep
    assert foreign != ours.prompt_texts.sep
    assert ours.encode(f"a{foreign}b") == stock.encode(f"a{foreign}b")


def test_slow_tokenizers():
    ours = with_primitives(CharTokenizer(), RAW)
    text = f"a{RAW.sep}b{FORGED}"
    assert ours.encode(text) == CharTokenizer().encode(text)
    assert ours.encode(f"a{ours.prompt_texts.sep}b").count(ours.hypic_ids.sep) == 1


def test_builders_refuse_texts_that_would_do_nothing():
    with pytest.raises(ValueError, match=r"texts\.literal=True: expected the tokenizer's prompt_texts"):
        build_prompt(segments=["a"], texts=RAW)
    assert build_prompt(segments=[RAW.sep], texts=own_seal().texts(PrimitiveIds(7, 8, 9))).count(RAW.sep) == 1
