"""Training a context: prompts, what is learned, going on after a break, the command and its file."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from lib.oracle.models import SIZES, random_segments, save_attention_model
from transformers import AutoTokenizer

from benchmarks.lib.random_models import save_text_model
from vllm_hypic.cli import main
from vllm_hypic.fingerprint import weights_digest
from vllm_hypic.primitives.context import read_learned
from vllm_hypic.tune.dense import Columns, Dense
from vllm_hypic.tune.prompts import PIECE_TOKENS, QUERY_TOKENS, Documents, held_out_prompts, read_documents
from vllm_hypic.tune.training import Measured, Schedule, Training, mean_kl, train

CLOSE = 1e-4
Texts = tuple[Documents, Documents]
"""What is trained on, and what is held out."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_attention_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def model(folder: Path) -> Dense:
    return Dense(folder, torch.float32)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty texts that serve, of 896 tokens or more, and others."""
    path = tmp_path_factory.mktemp("documents")
    (path / "inside").mkdir()
    for i, ids in enumerate(random_segments([946] * 20)):
        (path / "inside" / f"{i}.txt").write_text(" ".join(f"w{token}" for token in ids))
    (path / "short.txt").write_text("w10 w11")
    (path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    return path


@pytest.fixture(scope="module")
def texts(folder: Path, documents: Path) -> tuple[Documents, Documents]:
    return read_documents(documents, AutoTokenizer.from_pretrained(folder))


def columns(model: Dense, ids: list[int]) -> Columns:
    with torch.no_grad():
        return model.run(torch.tensor([ids]), torch.arange(len(ids)))[1]


def training_of(model: Dense, texts: tuple[Documents, Documents], steps: int, rate: float = 5e-3) -> Training:
    start = columns(model, random_segments([24], seed=3)[0])
    schedule = Schedule(steps, rate, check_steps=max(1, steps // 2))
    return Training(model, start, texts[0], held_out_prompts(texts[1], 2), schedule)


def stands_in(documents: Documents, run: tuple[int, ...]) -> bool:
    return any(run == text[i : i + len(run)] for text in documents.texts for i in range(len(text)))


def test_prompts(texts: Texts, folder: Path, documents: Path, tmp_path: Path) -> None:
    train, held_out = texts
    assert len(train.texts) == 16 and len(held_out.texts) == 4
    assert not set(train.texts) & set(held_out.texts)
    rng = random.Random(0)
    for _ in range(20):
        prompt = train.prompt(rng, in_order=True)
        assert stands_in(train, (*(t for piece in prompt.pieces for t in piece), *prompt.query))
        prompt = train.prompt(rng, in_order=False)
        assert {len(piece) for piece in prompt.pieces} == {PIECE_TOKENS} and len(prompt.query) == QUERY_TOKENS
        assert sum(stands_in(train, (*piece, *prompt.query)) for piece in prompt.pieces) == 1
    assert held_out_prompts(held_out, 3) == held_out_prompts(held_out, 3)
    (tmp_path / "one.txt").write_text((documents / "inside" / "0.txt").read_text())
    with pytest.raises(ValueError, match="1 texts of 896 tokens or more: expected at least 20"):
        read_documents(tmp_path, AutoTokenizer.from_pretrained(folder))


def test_a_record_behind_its_own_lead_is_exact(model: Dense, texts: tuple[Documents, Documents]) -> None:
    """What records see, where they stand, and what the query sees of them."""
    training = training_of(model, texts, 1)
    prompt = texts[0].prompt(random.Random(1), in_order=True)
    one = replace(prompt, pieces=prompt.pieces[:1])
    full = training.teacher(one)
    with torch.no_grad():
        assert (training.composed(one, columns(model, list(one.lead))) - full).abs().max() < CLOSE
        assert (training.composed(one, None) - full).abs().max() > 100 * CLOSE
        assert (training.composed(prompt, None) - training.teacher(prompt)).abs().max() > 100 * CLOSE


def test_training_helps_on_texts_that_it_has_not_seen(model: Dense, texts: Texts) -> None:
    training = training_of(model, texts, 60, rate=0.02)
    while not training.done:
        training.advance()
    assert mean_kl(training.best) < 0.9 * mean_kl(training.untrained)
    assert training.best == training.measure(training.learned)


def test_goes_on_where_it_was(model: Dense, texts: tuple[Documents, Documents], tmp_path: Path) -> None:
    whole, broken = training_of(model, texts, 4), training_of(model, texts, 4)
    for _ in range(4):
        whole.advance()
    for _ in range(2):
        broken.advance()
    broken.save(tmp_path / "state", "these")
    again = training_of(model, texts, 4)
    assert not again.resume(tmp_path / "nothing", "these") and not again.resume(tmp_path / "state", "others")
    assert again.resume(tmp_path / "state", "these") and again.step == 2
    again.advance()
    again.advance()
    assert again.done and again.best == whole.best
    assert torch.equal(again.learned.keys, whole.learned.keys)


def test_steps_before_the_end_of_the_time_are_judged(
    model: Dense, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, saved = training_of(model, texts, 1000, rate=0.02), list[int]()
    monkeypatch.setattr(training, "measure", lambda context: {"mixed": Measured(0.0, 0.0)})
    assert mean_kl(training.best) > 0
    training.advance()
    train(training, seconds=0, save=lambda: saved.append(training.step), told=lambda loss: None)
    assert saved == [1] and mean_kl(training.best) == 0, "the only step is measured when the time is over"


@pytest.mark.parametrize("name", ["Ernie4_5", "Cohere"])
def test_keys_that_are_rotated_otherwise_are_refused(tmp_path: Path, name: str) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    fields = SIZES | rope | {"num_hidden_layers": 2, "head_dim": 32, "hidden_size": 128}
    save_text_model(tmp_path, name=name, fields=fields)
    with pytest.raises(ValueError, match="layer 0 does not rotate its keys as Llama does"):
        Dense(tmp_path, torch.float32)


def tune(folder: Path, documents: Path, output: Path, *options: str) -> tuple[int, str]:
    arguments = [str(folder), "--documents", str(documents), "--output", str(output), *options]
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def test_command(folder: Path, documents: Path, tmp_path: Path) -> None:
    output = tmp_path / "context.safetensors"
    code, said = tune(folder, documents, output, "--steps", "60", "--checks", "2", "--rate", "0.02")
    assert code == 0, said
    assert "16 texts" in said and str(output) in said and not list(tmp_path.glob("*.state"))
    learned = read_learned(output)
    key, value = learned.tensors()
    assert key.shape == value.shape == (2, len(learned.tokens), 2, 64)
    assert learned.model == weights_digest(str(folder))
    *rest, last = output.read_bytes()
    output.write_bytes(bytes([*rest, last ^ 1]))
    assert read_learned(output).digest != learned.digest


def test_command_refuses_what_does_not_help(folder: Path, documents: Path, tmp_path: Path) -> None:
    output = tmp_path / "context.safetensors"
    useless = ("--steps", "1", "--checks", "1", "--rate", "0")
    for arguments, expected, says in (
        ((folder, documents, output, *useless), 1, "training did not help"),
        ((folder, documents, tmp_path / "x.bin"), 2, "expected a name that ends in .safetensors"),
        ((folder, documents, tmp_path / "no" / "x.safetensors"), 2, "does not exist"),
        ((folder, tmp_path, output), 2, "expected at least 20"),
        ((tmp_path, documents, output), 2, str(tmp_path)),
    ):
        code, said = tune(*arguments)
        assert code == expected and says in said and not output.exists()
    for content in (None, b"", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 40):
        if content is not None:
            output.write_bytes(content)
        with pytest.raises(ValueError, match="expected a file of vllm-hypic tune"):
            read_learned(output)
