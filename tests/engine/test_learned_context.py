"""Records behind K and V from a file, in a real engine against the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from oracle import Oracle

from .conftest import EngineFactory
from .engines import Engine, EngineError, audit, prompt, run_apart
from .test_contexts_and_islands import CONTEXT, asking, forget_streams, ours, whole
from .test_oracle_agreement import KL_FACTOR, NOISE_FACTOR, Distance, distance, first_token, texts

OTHER = CONTEXT[::-1]
"""What the file's K and V are of; it names other tokens, so that whoever computes them is found out."""
LEARNED = {"hypic_context": "learned"}


def write_kv(model: str, ids: Sequence[int], tokens: Sequence[int], path: str) -> None:
    """A file with K and V of ``ids`` for the weights of ``model``."""
    from vllm_hypic.fingerprint import weights_digest
    from vllm_hypic.primitives.learned import write_learned
    from vllm_hypic.tune.dense import Dense

    dense = Dense(model, torch.float32)
    with torch.no_grad():
        columns = dense.run(torch.tensor([list(ids)]), torch.arange(len(ids)))[1]
        raw = dense.moved(columns, -columns.positions)
    key, value = (x[:, 0].transpose(1, 2) for x in (raw.keys, raw.values))
    write_learned(Path(path), key, value, tokens, weights_digest(model), {})


@pytest.fixture(scope="module")
def learned(attention_model: Path, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    path = tmp_path_factory.mktemp("learned") / "context.safetensors"
    run_apart(write_kv, str(attention_model), OTHER, CONTEXT, str(path), log=engine_logs / "learned.log")
    return path


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, attention_model: Path, learned: Path) -> Engine:
    return module_engine(attention_model, max_logprobs=-1, options={"context_file": str(learned)})


@pytest.fixture(scope="module")
def oracle(attention_model: Path) -> Oracle:
    return Oracle(attention_model)


@pytest.fixture(scope="module")
def noise(engine: Engine, oracle: Oracle) -> Distance:
    plain = [whole(*parts) for parts in texts()]
    return distance([first_token(engine, t) for t in plain], [oracle.full_logprobs(t) for t in plain])


def theirs(oracle: Oracle, context: Sequence[int]) -> list[torch.Tensor]:
    return [
        oracle.next_token_logprobs(
            lead, segments, asking(segments, query), head=8, tail=8, context=list(context), islands={}
        )
        for lead, segments, query in texts()
    ]


def test_records_saw_what_the_file_says(engine: Engine, oracle: Oracle, noise: Distance) -> None:
    engine.reset()
    cold = ours(engine, LEARNED)
    found = distance(cold, theirs(oracle, OTHER))
    assert found.largest <= NOISE_FACTOR * noise.largest, f"{found}; ordinary requests: {noise}"
    assert found.kl <= KL_FACTOR * noise.kl, f"{found}; ordinary requests: {noise}"
    engine.call(forget_streams)
    assert all(torch.equal(a, b) for a, b in zip(cold, ours(engine, LEARNED), strict=True))
    computed = distance(cold, theirs(oracle, CONTEXT))
    assert computed.kl > 1.2 * KL_FACTOR * noise.kl or computed.largest > 1.2 * NOISE_FACTOR * noise.largest
    assert engine.call(audit).clean


def test_beside_a_text_of_the_same_tokens(engine: Engine) -> None:
    """Both contexts are of one engine, and their records are two."""
    lead, segments, query = texts()[0]
    ask = prompt(*segments, lead=lead, query=query)
    engine.reset()
    behind_file = first_token(engine, ask, LEARNED)
    behind_text = first_token(engine, ask, {"hypic_context": "text"})
    assert not torch.equal(behind_file, behind_text)
    engine.call(forget_streams)
    assert torch.equal(first_token(engine, ask, LEARNED), behind_file)


def test_other_weights_are_refused(
    module_engine: EngineFactory, attention_model: Path, learned: Path, tmp_path: Path
) -> None:
    other = tmp_path / "model"
    shutil.copytree(attention_model, other)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(EngineError, match="tuned for other weights"):
        module_engine(other, options={"context_file": str(learned)})


def test_models_with_states_are_refused(
    module_engine: EngineFactory, hybrid_model: Path, learned: Path
) -> None:
    options = {"context": "learned", "context_file": str(learned)}
    with pytest.raises(EngineError, match="tuned for other weights"):
        module_engine(hybrid_model, options=options)


def test_requests_ask_for_what_there_is(module_engine: EngineFactory, attention_model: Path) -> None:
    engine = module_engine(attention_model, max_logprobs=-1, options={"context": "none"})
    lead, segments, query = texts()[0]
    with pytest.raises(EngineError, match="this engine has no learned context"):
        first_token(engine, prompt(*segments, lead=lead, query=query), LEARNED)
