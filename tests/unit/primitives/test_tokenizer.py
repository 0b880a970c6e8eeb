"""The law: every segment tokenises as it would alone; everything else is the stock tokenizer."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.tokenizers.registry import get_tokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer

from vllm_hypic.config.engine import TOKENIZER_MODE
from vllm_hypic.engine.tokenizer import HypicTokenizer, register_mode
from vllm_hypic.primitives.tokens import Marker, PrimitiveIds, PrimitiveTexts, primitive_ids, split_text

from .conftest import CORPUS, LOSSLESS

register_mode()
T = PrimitiveTexts()

TOLD = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
DOCUMENTS = ["Document one: the capital", " of France.", "naïve café\n", "東京 12345", "  spaces  ", "a"]

# Words of the corpus, spaces and newlines, marks that tokenizers treat specially, and any character.
words = st.sampled_from(" ".join(CORPUS).split())
marks = st.sampled_from([" ", "  ", "\n", "▁", "<s>", "<|im_end|>", "</s>"])
texts = st.lists(st.one_of(words, marks, st.text(max_size=4)), max_size=6).map("".join)
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
    return load(tokenizer_dirs[kind], TOKENIZER_MODE)


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


any_kind = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def asked(documents: list[str]) -> list[Marker | str]:
    return [part for text in [*documents, "Question?"] for part in (Marker.SEP, text)]


@any_kind
@given(parts=parts)
@example(parts=asked(DOCUMENTS))
@example(parts=asked(DOCUMENTS[::-1]))
@example(parts=asked(DOCUMENTS[2:] + DOCUMENTS[:2]))
@example(parts=[*asked(DOCUMENTS)[:-1], ""])
def test_pieces_tokenise_as_alone_and_special_tokens_stand_once(stock, ours, parts):
    text = joined(parts)
    prefix, suffix = around(stock)
    core = expected_core(stock, ours.hypic_ids, text)
    assert ours.encode(text, add_special_tokens=False) == core
    whole = [*prefix, *core, *suffix] if T.contains(text) else stock.encode(text)
    assert ours.encode(text) == whole
    assert ours(text)["input_ids"] == whole
    assert ours.tokenize(text) == ours.convert_ids_to_tokens(core)


def test_leaving_the_cutting_to_the_tokenizer_would_break_the_law(tokenizer_dirs):
    """Control: with markers as mere special tokens a Llama-style tokenizer reads later pieces differently."""
    naive = copy.deepcopy(load(tokenizer_dirs["metaspace-first"], "hf"))
    naive.add_special_tokens({"additional_special_tokens": [T.sep]})
    ids = naive.encode(f"The dog{T.sep}The fox", add_special_tokens=False)
    at = ids.index(naive.convert_tokens_to_ids(T.sep))
    assert ids[:at] == naive.encode("The dog", add_special_tokens=False)
    assert ids[at + 1 :] != naive.encode("The fox", add_special_tokens=False)


@any_kind
@given(text=texts, add=st.booleans(), length=st.integers(3, 12) | st.none())
def test_text_without_primitives_is_byte_identical_to_stock(stock, ours, text, add, length):
    options = TOLD | {"add_special_tokens": add, "truncation": length is not None, "max_length": length}
    assert dict(ours(text, **options)) == dict(stock(text, **options))
    assert ours.encode(text, add_special_tokens=add) == stock.encode(text, add_special_tokens=add)
    assert ours.tokenize(text) == stock.tokenize(text)
    ids = stock.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == stock.decode(ids, skip_special_tokens=skip)


def test_settings_of_the_stock_tokenizer_are_kept(stock, ours):
    names = ("name_or_path", "truncation_side", "padding_side", "model_max_length", "chat_template")
    for name in (*names, "is_fast", "eos_token_id"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.truncation_side == "left"  # vLLM's choice for generation


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
    text, (prefix, _) = " ".join(CORPUS), around(stock)
    for n in (5, 17):
        ids = ours.encode(T.sep + text, truncation=True, max_length=n)
        assert ids == stock.encode(text, truncation=True, max_length=n)
        assert ids[: len(prefix)] == prefix and len(ids) == n


@any_kind
@given(parts=parts)
def test_offsets_point_at_the_text(stock, ours, parts):
    text = joined([*parts, Marker.PDEP])
    encoding = ours(text, add_special_tokens=False, **TOLD)
    expected, at = [], 0
    for part in split_text(text, T):
        if isinstance(part, Marker):
            expected.append((at, at + len(T[part])))
        else:
            offsets = stock(part, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            expected += [(s + at, e + at) for s, e in offsets]
        at += len(T[part]) if isinstance(part, Marker) else len(part)
    assert encoding["offset_mapping"] == expected
    for i, token in enumerate(encoding["input_ids"]):
        if (marker := ours.hypic_ids.marker(token)) is not None:
            assert text[slice(*expected[i])] == T[marker] and encoding["special_tokens_mask"][i] == 1


@pytest.mark.parametrize("padding", [True, "max_length"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_and_padding_have_the_form_of_stock(stock, ours, padding, side):
    plain = ["one two three four", "a"]
    options = TOLD | {"padding": padding, "max_length": 24, "padding_side": side}
    options |= {"return_length": True, "truncation": True}
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
    ("name", "value"),
    [("text_pair", "b"), ("text_target", "b"), ("return_overflowing_tokens", True), ("stride", 2)],
)
def test_options_that_separators_exclude_are_refused_by_name(ours, name, value):
    with pytest.raises(ValueError, match=f"{name} cannot be combined with separators"):
        ours(f"a{T.sep}b", **{name: value})
    with pytest.raises(ValueError, match="cannot be combined with separators"):
        ours("a", f"a{T.sep}b")


@any_kind
@given(parts=parts)
def test_decoding_gives_each_piece_back(stock, ours, kind, parts):
    text = joined(parts)
    ids = ours.encode(text, add_special_tokens=False)
    if kind in LOSSLESS:
        assert ours.decode(ids) == text
    shown = [T[p] if isinstance(p, Marker) else stock.decode(alone(stock, p)) for p in split_text(text, T)]
    assert ours.decode(ids) == "".join(shown)
    pieces = [p for p in split_text(text, T) if not isinstance(p, Marker)]
    hidden = [stock.decode(alone(stock, p), skip_special_tokens=True) for p in pieces]
    assert ours.decode(ids, skip_special_tokens=True) == "".join(hidden)
    assert ours.batch_decode([ids, ids]) == [ours.decode(ids)] * 2


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("detokenizer_cls", [FastIncrementalDetokenizer, SlowIncrementalDetokenizer])
def test_incremental_detokenisation_after_a_prompt_with_markers(stock, ours, skip, detokenizer_cls):
    answer = alone(stock, "The river is the Seine.")
    marked = ours.encode(f"a{T.sep}b{T.pdep}{T.pad}{T.sep}What?")
    sampling = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=False)
    common = {"request_id": "r", "sampling_params": sampling, "prompt_embeds": None}
    found = []
    for tokenizer, prompt in ((stock, alone(stock, "What?")), (ours, marked)):
        request = SimpleNamespace(prompt_token_ids=prompt, **common)
        detokenizer = detokenizer_cls(tokenizer, request)
        for token in answer:
            detokenizer.update([token], False)
        found.append(detokenizer.get_next_output_text(finished=True, delta=False))
    assert found[0] == found[1]


def test_added_ids_lie_behind_the_vocabulary(stock, ours):
    ids = primitive_ids(ours)
    assert sorted(ids) == [stock.max_token_id + 1, stock.max_token_id + 2, stock.max_token_id + 3]
    assert len(ours) == len(stock) + 3 and ours.max_token_id == max(ids)
    assert ours.max_chars_per_token >= max(len(text) for _, text in T.items())
    assert ours.convert_ids_to_tokens(list(ids)) == [text for _, text in T.items()]
    assert set(ids) <= set(ours.all_special_ids)
    assert {text for _, text in T.items()} <= set(ours.get_added_vocab())
    # The model cannot produce them.
    assert ours.get_vocab() == stock.get_vocab()


DUPLICATES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pool": lambda t: maybe_make_thread_pool(copy.copy(t), 2),
    "pool-deepcopy": lambda t: copy.deepcopy(maybe_make_thread_pool(copy.copy(t), 2)),
}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
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
