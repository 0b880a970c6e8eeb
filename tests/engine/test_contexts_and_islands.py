"""Records behind a context, of text or of K and V from a file, and recomputed windows inside them, in real
engines against the oracle."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.oracle import Oracle, random_segments

from vllm_hypic.connector.scheduler.island_runs import LONGEST_RUN

from .conftest import CONTEXT, EngineFactory
from .engines import Ask, Engine, EngineError, largest_distance, plan_of, prompt, run_apart, scheduler_of
from .test_oracle_agreement import NOISE_FACTOR, Distance, composed_by, distance, first_token, noise_of, texts

ISLANDS = "query-20"
CHUNKS = [pytest.param(4096, id="whole"), pytest.param(96, id="chunks-of-96", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CHUNKS)
def engine(
    request: pytest.FixtureRequest, module_engine: EngineFactory, model: Path, context_file: Path
) -> Iterator[Engine]:
    args = {"max_num_batched_tokens": request.param, "max_logprobs": -1}
    with module_engine(model, options={"context_file": str(context_file)}, **args) as started:
        yield started


def islands_of(llm: Any, tokens: Sequence[int], extra: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Row ranges of each interior segment, by index, that the engine's plan leaves to the stream."""
    found: dict[int, list[tuple[int, int]]] = {}
    for index, segment in enumerate(plan_of(llm, tokens, extra).segments[1:]):
        ends = [(segment.head, segment.head), *((p.first, p.stop) for p in segment.parts)]
        found[index] = [(a[1], b[0]) for a, b in pairwise(ends) if a[1] < b[0]]
    return found


def island_runs(llm: Any) -> tuple[int, int]:
    """Multiples of which vLLM keeps states of hybrid models for its prefix cache, and an island's longest
    run; any where a model has no states."""
    runs = scheduler_of(llm).hypic.island_runs
    return (256, LONGEST_RUN) if runs is None else (runs.unit, runs.longest)


def forget_streams(llm: Any) -> None:
    """Empty vLLM's prefix cache; records stay."""
    assert llm.reset_prefix_cache() and len(scheduler_of(llm).hypic.directory)


def asking(segments: Sequence[Sequence[int]], query: Sequence[int]) -> list[int]:
    """The query with words of two documents in it, so that islands are chosen there."""
    return [*query[:-2], *segments[0][60:66], *segments[-1][40:46], *query[-2:]]


def asked_texts() -> list[Any]:
    return [(lead, segments, asking(segments, query)) for lead, segments, query in texts()]


METHODS = [
    pytest.param({"hypic_context": "lead"}, "lead", id="lead"),
    pytest.param({"hypic_context": "text"}, "text", id="text"),
    pytest.param({"hypic_context": "text", "hypic_seam_tokens": 0}, "text", id="text-0"),
    pytest.param({"hypic_islands": ISLANDS}, None, id="islands"),
    pytest.param({"hypic_islands": ISLANDS, "hypic_seam_tokens": 0}, None, id="islands-0"),
    pytest.param({"hypic_context": "text", "hypic_islands": ISLANDS}, "text", id="text-islands"),
]


def theirs(
    oracle: Oracle, engine: Engine, extra: dict[str, Any], context: str | None, fault: str | None = None
) -> list[torch.Tensor]:
    seam = extra.get("hypic_seam_tokens", 8)
    answers = []
    for lead, segments, query in asked_texts():
        islands = engine.call(islands_of, prompt(*segments, lead=lead, query=query), extra)
        assert any(islands.values()) == ("hypic_islands" in extra)
        behind = {"lead": lead, "text": CONTEXT, "file": OTHER, None: []}[context]
        method = {"head": seam, "tail": seam, "context": behind, "islands": islands, "fault": fault}
        runs = engine.call(island_runs)
        answers.append(oracle.next_token_logprobs(lead, segments, query, island_runs=runs, **method))
    return answers


def ours(engine: Engine, extra: dict[str, Any]) -> list[torch.Tensor]:
    return composed_by(engine, asked_texts(), extra)


@pytest.mark.parametrize(("extra", "context"), METHODS)
def test_agrees(
    engine: Engine, oracle: Oracle, noise: Distance, extra: dict[str, Any], context: str | None
) -> None:
    engine.reset()
    cold = ours(engine, extra)
    found = distance(cold, theirs(oracle, engine, extra, context))
    assert found.margin(noise) <= 1, f"{found}; ordinary requests: {noise}"
    # One of these streams is a token longer than a KV block: with vLLM's own cache its warm run is a decode.
    engine.call(forget_streams)
    warm = ours(engine, extra)
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True)), "cold is warm, bit for bit"


@pytest.mark.parametrize(
    ("extra", "context", "fault"),
    [
        ({"hypic_context": "text"}, "text", "context_in_positions"),
        ({"hypic_context": "text"}, None, None),
        ({"hypic_context": "text"}, "lead", None),
        ({"hypic_context": "lead"}, None, None),
        ({"hypic_islands": ISLANDS}, None, "island_counted_twice"),
        ({"hypic_islands": ISLANDS}, None, "island_in_states"),
    ],
)
def test_planted_faults_are_seen(
    engine: Engine,
    oracle: Oracle,
    noise: Distance,
    extra: dict[str, Any],
    context: str | None,
    fault: str | None,
) -> None:
    """Were the engine to make this mistake, a bound of ``test_agrees`` would be broken."""
    if fault == "island_in_states" and "linear_attention" not in oracle.layer_types:
        right, wrong = (theirs(oracle, engine, extra, context, f) for f in (None, fault))
        assert all(map(torch.equal, right, wrong)), "without states there is nothing to go wrong"
        return
    found = distance(ours(engine, extra), theirs(oracle, engine, extra, context, fault))
    assert found.margin(noise) > 1.2, f"{found}; noise {noise}"


def test_a_stream_that_goes_on_inside_an_island(engine: Engine, oracle: Oracle, noise: Distance) -> None:
    """vLLM's prefix cache has the stream up to a block's end; what comes behind it is an island's rest."""
    unit_and_longest, extra = engine.call(island_runs), {"hypic_islands": "query-50"}
    block = unit_and_longest[0]
    lead, document = random_segments([40, 4 * block], vocab=480, seed=31)
    query = [*document[block : 3 * block : 7], document[0]]
    tokens = prompt(document, lead=lead, query=query)
    islands = engine.call(islands_of, tokens, extra)
    [runs] = islands.values()
    places = pairwise(accumulate((stop - first for first, stop in runs), initial=8))
    assert any(first < block < stop for first, stop in places), f"no island over token {block}: {runs}"
    engine.reset()
    fresh, resumed = (engine.ask(Ask(tokens, 1, extra, sampling={"logprobs": -1}))[0] for _ in range(2))
    assert resumed.cached - fresh.cached >= block
    given = {"islands": islands, "island_runs": unit_and_longest}
    expected = oracle.next_token_logprobs(lead, [document], query, **given)
    for answer in (fresh, resumed):
        found = distance([torch.tensor([answer.first[i] for i in range(len(expected))])], [expected])
        assert found.largest <= NOISE_FACTOR * noise.largest, f"{found}; ordinary requests: {noise}"


def test_nothing_is_left_behind(engine: Engine) -> None:
    """Requests that come together, end early and are asked again.

    Alone they are cut into other chunks, which changes last bits (0.10 of a logprob; another of these is 0.49
    away at least), so what is all but a tie later on may fall the other way.
    """
    engine.reset()
    lead, segments, query = asked_texts()[0]
    tokens = prompt(*segments, lead=lead, query=query)
    asks = [Ask(tokens, 4, dict(param.values[0])) for param in METHODS]  # type: ignore[arg-type]
    together = engine.ask(*asks)
    engine.reset()
    alone = engine.ask_one_by_one(*asks)
    assert [answer.tokens[0] for answer in together] == [answer.tokens[0] for answer in alone]
    assert largest_distance(together, alone) <= 0.3
    engine.check_clean()


def resolved(model: str, options: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Context and islands of engines with these options, by vLLM's own making of a configuration."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_hypic.config.engine import config_of

    def made(chosen: dict[str, Any]) -> tuple[str, str]:
        more: dict[str, Any] = {}
        if chosen.pop("blind", False):
            chosen["token_ids"] = {"sep": 496, "pdep": 497, "pad": 498}
            more["skip_tokenizer_init"] = True
        args = EngineArgs(model, attention_backend="hypic", additional_config={"hypic": chosen}, **more)
        found = [config_of(args.create_engine_config()) for _ in range(2)]
        assert found[0] == found[1], "arguments may be used again"
        return found[0].context, found[0].islands

    return [made({"gate": {"require": "off"}, **chosen}) for chosen in options]


def test_the_default_depends_on_the_model(model: Path, engine_logs: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"islands": "none"}, {"context": "lead"}]
    options += [{"link": "epic-0"}, {"blind": True}]
    found = run_apart(resolved, str(model), options, log=engine_logs / "resolved.log")
    if model.name == "hybrid":
        assert found == [("none", "none")] * 2 + [("lead", "none")] + [("none", "none")] * 2
    else:
        assert found == [
            ("text", "query-15-96"),
            ("text", "none"),
            ("lead", "query-15-96"),
            ("none", "none"),  # its own tokens stand where a context would
            ("none", "none"),
        ]


OTHER = CONTEXT[::-1]
"""What the file's K and V are of; it names other tokens, so that whoever computes them is found out."""
LEARNED = {"hypic_context": "learned"}


def write_kv(model: str, ids: Sequence[int], tokens: Sequence[int], path: str) -> None:
    """A file with K and V of ``ids`` for the weights of ``model``."""
    from vllm_hypic.fingerprint import weights_digest
    from vllm_hypic.primitives.context import write_learned
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
def behind_file(module_engine: EngineFactory, attention_model: Path, learned: Path) -> Engine:
    return module_engine(attention_model, max_logprobs=-1, options={"context_file": str(learned)})


def test_records_saw_what_the_file_says(behind_file: Engine, attention_model: Path) -> None:
    engine, oracle = behind_file, Oracle(attention_model)
    noise = noise_of(engine, oracle)
    engine.reset()
    cold = ours(engine, LEARNED)
    found, computed = (distance(cold, theirs(oracle, engine, LEARNED, of)) for of in ("file", "text"))
    assert found.margin(noise) <= 1 and computed.margin(noise) > 1.2, f"{found}; ordinary requests: {noise}"
    engine.call(forget_streams)
    assert all(torch.equal(a, b) for a, b in zip(cold, ours(engine, LEARNED), strict=True))
    engine.check_clean()


def test_beside_a_text_of_the_same_tokens(behind_file: Engine) -> None:
    """Both contexts are of one engine, and their records are two."""
    engine = behind_file
    lead, segments, query = texts()[0]
    ask = prompt(*segments, lead=lead, query=query)
    engine.reset()
    one, other = (first_token(engine, ask, extra) for extra in (LEARNED, {"hypic_context": "text"}))
    assert not torch.equal(one, other)
    engine.call(forget_streams)
    assert torch.equal(first_token(engine, ask, LEARNED), one)


def test_other_weights_are_refused(
    module_engine: EngineFactory, attention_model: Path, hybrid_model: Path, learned: Path, tmp_path: Path
) -> None:
    """Those of another configuration, and those of a model with states."""
    other = shutil.copytree(attention_model, tmp_path / "model")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    options = {"context_file": str(learned)}
    for path, chosen in ((other, options), (hybrid_model, options | {"context": "learned"})):
        with pytest.raises(EngineError, match="is of other weights: retrain it"):
            module_engine(path, options=chosen)


def test_requests_ask_for_what_there_is(module_engine: EngineFactory, attention_model: Path) -> None:
    engine = module_engine(attention_model, max_logprobs=-1, options={"context": "none"})
    lead, segments, query = texts()[0]
    with pytest.raises(EngineError, match="this engine has no learned context"):
        first_token(engine, prompt(*segments, lead=lead, query=query), LEARNED)
