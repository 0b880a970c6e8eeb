"""The emulation of composed prompts, against the model itself: all rows recomputed, none, one segment."""

from pathlib import Path

import pytest
import torch
from lib.oracle.models import random_segments, save_attention_model
from transformers import AutoModelForCausalLM

from benchmarks.emulated import Composed, columns_of
from vllm_hypic.eval.task import Prompt
from vllm_hypic.tune.dense import Dense

TOKENS = 4
CLOSE = 1e-4  # float32, of scores that are of the size of 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_attention_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def model(folder: Path) -> Dense:
    return Dense(str(folder), torch.float32)


def prompt_of(*lengths: int) -> Prompt:
    head, *documents, question = map(tuple, random_segments(list(lengths)))
    return Prompt(head, tuple(documents), question)


def test_all_rows_again_are_full_recompute(folder: Path, model: Dense) -> None:
    composed = Composed(model, prompt := prompt_of(5, 30, 17, 23, 9), None)
    scores, ids = composed.answer(None, TOKENS)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt.plain()])).logits[0, -1]
    assert (scores - expected).abs().max() < CLOSE
    again, same = composed.answer(range(5, composed.end), TOKENS)
    assert (again - scores).abs().max() < CLOSE
    assert same == ids
    alone, _ = composed.answer((), TOKENS)
    assert (alone - scores).abs().max() > 100 * CLOSE


def test_likelihoods_are_those_of_the_tokens_one_by_one(model: Dense) -> None:
    composed = Composed(model, prompt_of(5, 30, 17, 9), None)
    rows = [7, 8, 20, 40]
    first, ids = composed.answer(rows, TOKENS)
    scores, nats = composed.likelihood(rows, ids)
    assert torch.equal(scores, first)
    longer, single = [], first
    for token in ids:
        longer.append(-float(single.log_softmax(-1)[token]))
        prompt = composed.prompt
        asked = Prompt(prompt.head, prompt.documents, (*prompt.question, *ids[: len(longer)]))
        single, _ = Composed(model, asked, None).answer(rows, 1)
    assert nats == pytest.approx(sum(longer) / len(ids), abs=CLOSE)


def test_a_segment_behind_its_own_head_is_exact(model: Dense) -> None:
    """What a record saw, and where it stands: K is rotated by the right number of positions."""
    prompt = prompt_of(6, 40, 8)
    head = columns_of(model, prompt.head)
    composed = Composed(model, prompt, head)
    full, _ = composed.answer(None, TOKENS)
    assert (composed.answer((), TOKENS)[0] - full).abs().max() < CLOSE
    moved = Composed(model, prompt_of(6, 40, 8), None).records
    there = columns_of(model, prompt.documents[0], 6)
    assert (moved.keys[:, :, :, 6:] - there.keys).abs().max() < CLOSE


def test_criteria_find_what_they_are_about(model: Dense) -> None:
    composed = Composed(model, prompt_of(5, 30, 17, 9), None)
    assert composed.draws.shape == composed.deviation.shape == (composed.end,)
    assert composed.deviation[:5].max() < CLOSE < composed.deviation[5:].max()
    assert 0 < composed.draws.sum() < 1  # the question's rows draw the rest


def test_refuses_what_it_does_not_emulate(tmp_path: Path) -> None:
    folder = save_attention_model(tmp_path, dtype=torch.float32)
    config = folder / "config.json"
    linear = '"rope_type": "linear", "factor": 2.0'
    config.write_text(config.read_text().replace('"rope_type": "default"', linear))
    with pytest.raises(ValueError, match="default, full RoPE"):
        Dense(str(folder))
