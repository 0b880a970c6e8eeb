"""Every segment tokenises as it would alone; everything else is the stock tokenizer."""

from __future__ import annotations

import copy
import json
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AddedToken, PythonBackend
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.tokenizers.registry import get_tokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer

from vllm_hypic.engine.tokenizer import (
    MODE,
    TOKENS_ENV,
    HypicTokenizer,
    publish_texts,
    published_texts,
    register_mode,
    with_primitives,
)
from vllm_hypic.primitives.tokens import (
    Marker,
    PrimitiveIds,
    PrimitiveTexts,
    primitive_ids,
    split_ids,
    split_text,
)

from .conftest import CORPUS, LOSSLESS

register_mode()
T = PrimitiveTexts()

DOCUMENTS = ["Document one: the capital", " of France.", "naïve café\n", "東京 12345", "  spaces  ", "a"]

# Words of the corpus, spaces and newlines, marks that tokenizers treat specially, and any character.
words = st.sampled_from(" ".join(CORPUS).split())
texts = st.lists(
    st.one_of(
        words, st.sampled_from([" ", "  ", "\n", "▁", "<s>", "<|im_end|>", "</s>"]), st.text(max_size=4)
    ),
    max_size=6,
).map("".join)
parts = st.lists(st.one_of(st.sampled_from(Marker), texts), min_size=1, max_size=8)


def joined(parts) -> str:
    return "".join(T[p] if isinstance(p, Marker) else p for p in parts)


@lru_cache
def load(directory: Path, mode: str):
    return get_tokenizer(str(directory), tokenizer_mode=mode, runner_type="generate")


@pytest.fixture
def stock(tokenizer_dirs, kind):
    """The tokenizer as vLLM without the plugin loads it: the reference, a separate object."""
    return load(tokenizer_dirs[kind], "hf")


@pytest.fixture
def ours(tokenizer_dirs, kind):
    return load(tokenizer_dirs[kind], MODE)


def around(tokenizer) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text, by the tokenizer's own account."""
    mask = tokenizer("a", return_special_tokens_mask=True)
    ids, special = mask["input_ids"], mask["special_tokens_mask"]
    first = special.index(0)
    last = len(special) - special[::-1].index(0)
    return ids[:first], ids[last:]


def alone(stock, piece: str) -> list[int]:
    return stock.encode(piece, add_special_tokens=False)


def expected_core(stock, ids: PrimitiveIds, text: str) -> list[int]:
    return [t for p in split_text(text, T) for t in ([ids[p]] if isinstance(p, Marker) else alone(stock, p))]


any_kind = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# -- the law -----------------------------------------------------------------


def test_documents_in_any_order_have_the_ids_they_have_alone(stock, ours):
    prefix, suffix = around(stock)
    for order in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[2:] + DOCUMENTS[:2]):
        found = split_ids(ours.encode(T.sep.join(["", *order, "Question?"])), ours.hypic_ids)
        segments = [part for part in found if not isinstance(part, Marker)]
        if prefix:
            assert segments.pop(0) == prefix
        query = segments.pop()
        assert segments == [alone(stock, d) for d in order]
        assert query == alone(stock, "Question?") + suffix


@any_kind
@given(parts=parts)
def test_pieces_tokenise_as_alone_and_special_tokens_stand_once(stock, ours, parts):
    text = joined(parts)
    prefix, suffix = around(stock)
    core = expected_core(stock, ours.hypic_ids, text)
    assert ours.encode(text, add_special_tokens=False) == core
    whole = [*prefix, *core, *suffix] if T.contains(text) else stock.encode(text)
    assert ours.encode(text) == whole
    assert ours(text)["input_ids"] == whole
    assert ours.tokenize(text) == ours.convert_ids_to_tokens(core)


def test_special_tokens_stand_at_the_ends_only(stock, ours):
    prefix, suffix = around(stock)
    ids = ours.encode(T.sep.join(["", *DOCUMENTS, ""]))
    assert ids[: len(prefix)] == prefix
    assert ids[len(ids) - len(suffix) :] == suffix
    assert not {*prefix, *suffix} & {*ids[len(prefix) : len(ids) - len(suffix)]}


def test_leaving_the_cutting_to_the_tokenizer_would_break_the_law(tokenizer_dirs):
    """Control: with markers as mere special tokens a Llama-style tokenizer reads later pieces differently."""
    naive = copy.deepcopy(load(tokenizer_dirs["metaspace-first"], "hf"))
    naive.add_special_tokens({"additional_special_tokens": [T.sep]})
    ids = naive.encode(f"The dog{T.sep}The fox", add_special_tokens=False)
    at = ids.index(naive.convert_tokens_to_ids(T.sep))
    assert ids[:at] == naive.encode("The dog", add_special_tokens=False)
    assert ids[at + 1 :] != naive.encode("The fox", add_special_tokens=False)


# -- text without primitives is stock ----------------------------------------


@any_kind
@given(text=texts, add=st.booleans(), length=st.integers(3, 12) | st.none())
def test_text_without_primitives_is_byte_identical_to_stock(stock, ours, text, add, length):
    options = {
        "add_special_tokens": add,
        "truncation": length is not None,
        "max_length": length,
        "return_offsets_mapping": True,
        "return_special_tokens_mask": True,
    }
    assert dict(ours(text, **options)) == dict(stock(text, **options))
    assert ours.encode(text, add_special_tokens=add) == stock.encode(text, add_special_tokens=add)
    assert ours.tokenize(text) == stock.tokenize(text)
    ids = stock.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == stock.decode(ids, skip_special_tokens=skip)


def test_settings_of_the_stock_tokenizer_are_kept(stock, ours):
    for name in (
        "name_or_path",
        "truncation_side",
        "padding_side",
        "model_max_length",
        "chat_template",
        "is_fast",
    ):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.eos_token_id == stock.eos_token_id
    assert ours.truncation_side == "left"  # vLLM's choice for generation


# -- options of a call -------------------------------------------------------


@any_kind
@given(parts=parts, length=st.integers(0, 12), side=st.sampled_from(["left", "right"]))
def test_truncation_applies_to_the_whole(stock, ours, parts, length, side):
    text = joined([*parts, Marker.SEP])
    prefix, suffix = around(stock)
    core = expected_core(stock, ours.hypic_ids, text)
    keep = max(0, length - len(prefix) - len(suffix))
    core = core[max(0, len(core) - keep) :] if side == "left" else core[:keep]
    tokenizer = copy.copy(ours)
    tokenizer.truncation_side = side
    assert tokenizer.encode(text, truncation=True, max_length=length) == [*prefix, *core, *suffix]
    assert tokenizer.encode(text, max_length=length) == [*prefix, *core, *suffix]  # as stock: implied
    assert tokenizer.truncation_side == side


def test_truncation_agrees_with_stock_on_the_same_tokens(stock, ours):
    """The cut of a text that is one piece between two markers is the cut stock makes of it."""
    text = " ".join(CORPUS)
    for n in (5, 17):
        stock_ids = stock.encode(text, truncation=True, max_length=n)
        prefix, _ = around(stock)
        ids = ours.encode(T.sep + text, truncation=True, max_length=n)
        assert ids == stock_ids
        assert ids[: len(prefix)] == prefix
        assert len(ids) == n


@any_kind
@given(parts=parts)
def test_offsets_point_at_the_text(stock, ours, parts):
    text = joined([*parts, Marker.PDEP])
    encoding = ours(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, add_special_tokens=False
    )
    expected, at = [], 0
    for part in split_text(text, T):
        if isinstance(part, Marker):
            expected.append((at, at + len(T[part])))
        else:
            offsets = stock(part, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            expected += [(s + at, e + at) for s, e in offsets]
        at += len(T[part]) if isinstance(part, Marker) else len(part)
    assert encoding["offset_mapping"] == expected
    for token, (start, end), special in zip(
        encoding["input_ids"], encoding["offset_mapping"], encoding["special_tokens_mask"], strict=True
    ):
        marker = ours.hypic_ids.marker(token)
        if marker is not None:
            assert text[start:end] == T[marker]
            assert special == 1


@pytest.mark.parametrize("padding", [True, "max_length"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_and_padding_have_the_form_of_stock(stock, ours, padding, side):
    plain = ["one two three four", "a"]
    options = {
        "padding": padding,
        "max_length": 24,
        "padding_side": side,
        "truncation": True,
        "return_special_tokens_mask": True,
        "return_offsets_mapping": True,
        "return_length": True,
    }
    reference = stock(plain, **options)
    batch = ours([*plain, f"a{T.sep}b"], **options)
    assert batch.keys() == reference.keys()
    width = len(batch["input_ids"][0])
    assert {len(row) for key in batch if key != "length" for row in batch[key]} == {width}
    if width == len(reference["input_ids"][0]):
        assert {key: batch[key][:2] for key in batch} == dict(reference)
    real = [t for t, m in zip(batch["input_ids"][2], batch["attention_mask"][2], strict=True) if m]
    assert real == ours.encode(f"a{T.sep}b")


def test_tensors(ours):
    encoding = ours(f"a{T.sep}b", return_tensors="pt")
    assert torch.equal(encoding["input_ids"], torch.tensor([ours.encode(f"a{T.sep}b")]))
    assert ours.decode(encoding["input_ids"]) == [ours.decode(ours.encode(f"a{T.sep}b"))]


def test_split_special_tokens_takes_markers_as_plain_text(stock, ours):
    text = f"a{T.sep}b"
    assert ours.encode(text, split_special_tokens=True) == stock.encode(text, split_special_tokens=True)


@pytest.mark.parametrize(
    "options",
    [
        {"text_pair": "b"},
        {"text_target": "b"},
        {"return_overflowing_tokens": True},
        {"stride": 2},
    ],
)
def test_options_that_separators_exclude_are_refused_by_name(ours, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} cannot be combined with separators"):
        ours(f"a{T.sep}b", **options)
    with pytest.raises(ValueError, match="cannot be combined with separators"):
        ours("a", f"a{T.sep}b")


# -- decoding ----------------------------------------------------------------


@any_kind
@given(parts=parts)
def test_decoding_gives_each_piece_back(stock, ours, kind, parts):
    text = joined(parts)
    ids = ours.encode(text, add_special_tokens=False)
    if kind in LOSSLESS:
        assert ours.decode(ids) == text
    shown = [T[p] if isinstance(p, Marker) else stock.decode(alone(stock, p)) for p in split_text(text, T)]
    assert ours.decode(ids) == "".join(shown)
    hidden = [
        stock.decode(alone(stock, p), skip_special_tokens=True)
        for p in split_text(text, T)
        if not isinstance(p, Marker)
    ]
    assert ours.decode(ids, skip_special_tokens=True) == "".join(hidden)
    assert ours.batch_decode([ids, ids]) == [ours.decode(ids)] * 2


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("detokenizer_cls", [FastIncrementalDetokenizer, SlowIncrementalDetokenizer])
def test_incremental_detokenisation_after_a_prompt_with_markers(stock, ours, skip, detokenizer_cls):
    answer = alone(stock, "The river is the Seine.")
    text = {}
    for name, tokenizer in (("stock", stock), ("ours", ours)):
        prompt = (
            alone(stock, "What?") if name == "stock" else ours.encode(f"a{T.sep}b{T.pdep}{T.pad}{T.sep}What?")
        )
        request = SimpleNamespace(
            request_id="r",
            sampling_params=SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=False),
            prompt_token_ids=prompt,
            prompt_embeds=None,
        )
        detokenizer = detokenizer_cls(tokenizer, request)
        for token in answer:
            detokenizer.update([token], False)
        text[name] = detokenizer.get_next_output_text(finished=True, delta=False)
    assert text["ours"] == text["stock"]


# -- vocabulary --------------------------------------------------------------


def test_added_ids_lie_behind_the_vocabulary(stock, ours):
    ids = primitive_ids(ours)
    assert sorted(ids) == [stock.max_token_id + 1, stock.max_token_id + 2, stock.max_token_id + 3]
    assert len(ours) == len(stock) + 3
    assert ours.max_token_id == max(ids)
    assert ours.max_chars_per_token >= max(len(text) for _, text in T.items())
    assert ours.convert_ids_to_tokens(list(ids)) == [text for _, text in T.items()]
    assert set(ids) <= set(ours.all_special_ids)
    assert {text for _, text in T.items()} <= set(ours.get_added_vocab())
    # The model cannot produce them.
    assert ours.get_vocab() == stock.get_vocab()


# -- copies ------------------------------------------------------------------


def _pooled(tokenizer):
    return maybe_make_thread_pool(copy.copy(tokenizer), 2)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
        _pooled,
        lambda t: copy.deepcopy(_pooled(t)),
    ],
    ids=["copy", "deepcopy", "pickle", "pool", "pool-deepcopy"],
)
def test_copies_behave_the_same(ours, duplicate):
    text = f"one{T.sep}two{T.pdep}three{T.pad}{T.sep}four"
    other = duplicate(duplicate(ours))
    assert isinstance(other, HypicTokenizer)
    assert primitive_ids(other) == primitive_ids(ours)
    assert other.encode(text) == ours.encode(text)
    assert dict(other(text)) == dict(ours(text))
    assert other.decode(other.encode(text)) == ours.decode(ours.encode(text))
    assert (len(other), other.max_token_id) == (len(ours), ours.max_token_id)
    assert other.get_vocab() == ours.get_vocab()
    assert other.all_special_ids == ours.all_special_ids


def test_thread_pool_under_concurrency(ours):
    pool = maybe_make_thread_pool(copy.copy(ours), 2)
    prompts = [T.sep.join([*DOCUMENTS[i % 6 :], f"question {i}"]) for i in range(64)]
    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(lambda p: pool(p, truncation=True, max_length=20)["input_ids"], prompts))
    assert found == [ours(p, truncation=True, max_length=20)["input_ids"] for p in prompts]


# -- configured texts --------------------------------------------------------


@pytest.fixture
def clean_environment(monkeypatch):
    # publish_texts() writes the variable itself; monkeypatch restores what stood there before.
    monkeypatch.setenv(TOKENS_ENV, "")


def test_texts_come_from_the_environment(tokenizer_dirs, clean_environment):
    assert published_texts() == T
    texts = PrimitiveTexts(sep="<<PIC_SEP>>")
    publish_texts(texts)
    assert published_texts() == texts
    tokenizer = get_tokenizer(str(tokenizer_dirs["qwen"]), tokenizer_mode=MODE, runner_type="generate")
    assert tokenizer.hypic_texts == texts
    assert tokenizer.encode("a<<PIC_SEP>>b")[1] == primitive_ids(tokenizer).sep
    assert not primitive_ids(tokenizer).contains(tokenizer.encode("a<|hypic_sep|>b"))


def test_publishing_other_texts_empties_vllms_tokenizer_cache(tokenizer_dirs, clean_environment):
    from vllm.tokenizers import cached_get_tokenizer

    path = str(tokenizer_dirs["qwen"])
    for sep in ("[S1]", "[S2]"):
        publish_texts(PrimitiveTexts(sep=sep))
        assert cached_get_tokenizer(path, tokenizer_mode=MODE).hypic_texts.sep == sep
    again = cached_get_tokenizer(path, tokenizer_mode=MODE)
    publish_texts(PrimitiveTexts(sep="[S2]"))
    assert cached_get_tokenizer(path, tokenizer_mode=MODE) is again


def test_a_damaged_variable_is_named(monkeypatch):
    monkeypatch.setenv(TOKENS_ENV, '{"sep": ""}')
    with pytest.raises(
        ValueError, match=f"environment variable {TOKENS_ENV}: sep='': expected a non-empty string"
    ):
        published_texts()


def test_a_token_of_the_vocabulary_keeps_its_id(tokenizer_dirs):
    texts = PrimitiveTexts(sep="<|im_end|>")
    stock = load(tokenizer_dirs["qwen"], "hf")
    tokenizer = HypicTokenizer.from_pretrained(str(tokenizer_dirs["qwen"]), primitive_texts=texts)
    assert primitive_ids(tokenizer).sep == stock.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) == len(stock) + 2
    # It was the model's own to begin with.
    assert tokenizer.get_vocab() == stock.get_vocab()
    assert copy.deepcopy(tokenizer).get_vocab() == stock.get_vocab()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"sep": "Ġ"}, "sep='Ġ': the vocabulary uses this string for ' '"),
        ({"pad": "<|im"}, "pad='<|im': is part of the model's token '<|im_start|>'"),
    ],
)
def test_texts_that_would_change_ordinary_text_are_refused(tokenizer_dirs, texts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HypicTokenizer.from_pretrained(str(tokenizer_dirs["qwen"]), primitive_texts=PrimitiveTexts(**texts))


def test_a_token_that_stands_around_every_text_is_refused(tokenizer_dirs):
    for kind, text in (("bert", "[SEP]"), ("llama-legacy", "<s>")):
        with pytest.raises(ValueError, match="itself puts this token around every text"):
            HypicTokenizer.from_pretrained(
                str(tokenizer_dirs[kind]), primitive_texts=PrimitiveTexts(sep=text)
            )


def test_demo_model_with_its_own_separator():
    path = Path(__file__).parents[2] / "examples/models/tiny-hybrid-qa/model"
    texts = PrimitiveTexts(sep="<sep>")
    tokenizer = HypicTokenizer.from_pretrained(str(path), primitive_texts=texts)
    stock = load(path, "hf")
    assert primitive_ids(tokenizer) == PrimitiveIds(sep=4, pdep=512, pad=513)
    documents = ["ent0 => ent1 .", "ent2 => ent3 ."]
    found = split_ids(tokenizer.encode("<sep>".join([*documents, "? ent0"])), primitive_ids(tokenizer))
    assert [p for p in found if not isinstance(p, Marker)] == [
        alone(stock, d) for d in [*documents, "? ent0"]
    ]


def test_primitive_ids_of_other_tokenizers_point_the_way_out(tokenizer_dirs):
    with pytest.raises(ValueError, match="--tokenizer-mode hypic"):
        primitive_ids(load(tokenizer_dirs["qwen"], "hf"))
    with pytest.raises(ValueError, match=r"skip_tokenizer_init.*token_ids"):
        primitive_ids(None)
    with pytest.raises(ValueError, match="--tokenizer-mode hf"):
        with_primitives(object(), T)


def test_adding_twice_changes_nothing(tokenizer_dirs):
    once = copy.deepcopy(load(tokenizer_dirs["qwen"], MODE))
    twice = with_primitives(once, T)
    assert (primitive_ids(twice), len(twice)) == (primitive_ids(once), len(once))
    assert twice.get_vocab() == once.get_vocab()
    other = with_primitives(once, PrimitiveTexts(sep="[SEP]"))
    assert other.get_vocab() == once.get_vocab()
    assert other.encode("a[SEP]b", add_special_tokens=False)[1] == primitive_ids(other).sep == len(once)


# -- slow tokenizers ---------------------------------------------------------


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
        documents = ["one", "two words", " three"]
        ids = tokenizer.encode(T.sep.join([*documents, "why?"]))
        assert ids[0] == stock.bos_token_id
        assert stock.bos_token_id not in ids[1:]
        found = split_ids(ids[1:], primitive_ids(tokenizer))
        assert [p for p in found if not isinstance(p, Marker)] == [
            alone(stock, d) for d in [*documents, "why?"]
        ]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "".join([*documents, "why?"])
        assert tokenizer.encode("plain text") == stock.encode("plain text")
        assert dict(tokenizer("plain text")) == dict(stock("plain text"))
        assert tokenizer.max_token_id == max(primitive_ids(tokenizer))


# -- structured output -------------------------------------------------------


def _allowed(backend_cls, tokenizer, vocab_size: int, schema: str) -> set[int]:
    """Ids that a structured-output backend of vLLM allows after ``["``."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=True, disable_additional_properties=False
        ),
        model_config=None,
        speculative_config=None,
    )
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
    stock, ours = load(tokenizer_dirs["qwen"], "hf"), load(tokenizer_dirs["qwen"], MODE)
    vocab_size = len(stock) if model_rows == "fewer" else len(stock) + 64
    schema = json.dumps({"type": "array", "items": {"type": "string"}})
    expected = _allowed(backend_cls, stock, vocab_size, schema)
    found = _allowed(backend_cls, ours, vocab_size, schema)
    assert found == expected
    assert len(found) > 50
    assert not found & set(primitive_ids(ours))


def test_outlines_vocabulary_is_stock(tokenizer_dirs):
    from vllm.v1.structured_output.utils import _reduced_vocabulary

    ours, stock = (_reduced_vocabulary(load(tokenizer_dirs["qwen"], mode)) for mode in (MODE, "hf"))
    assert {text: set(ids) for text, ids in ours.items()} == {text: set(ids) for text, ids in stock.items()}


def test_special_tokens_with_stripping_do_not_eat_a_segments_spaces(tokenizer_dirs):
    """A configured token of the vocabulary may strip the spaces beside it; the segments keep theirs."""
    plain = copy.deepcopy(load(tokenizer_dirs["gpt2"], "hf"))
    plain.add_special_tokens({"additional_special_tokens": [AddedToken("<cut>", lstrip=True, rstrip=True)]})
    tokenizer = with_primitives(plain, PrimitiveTexts(sep="<cut>"))
    found = split_ids(tokenizer.encode("one <cut> two"), primitive_ids(tokenizer))
    assert [tokenizer.decode(p) for p in found if not isinstance(p, Marker)] == ["one ", " two"]
