"""Options of requests that look at prompts, words or adapters: with segments as without.

K and V of a model of one attention layer depend on a token alone, so composing is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from . import tiny_models
from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, answer_of, prompt, run_apart, same, sampling_params
from .prompt_processor import FAVOUR, NAME

THINK, THOUGHT = 10, 11
"""Words between which the model reasons."""
LEAD, FIRST, SECOND, QUERY = (
    [12 if token in (THINK, THOUGHT) else token for token in segment]
    for segment in random_segments([40, 150, 70, 21], vocab=480)
)
ADAPTERS = ("one", "other")
FULL = {"hypic_link": "full"}


def ask(
    first: list[int] = FIRST, second: list[int] = SECOND, query: list[int] = QUERY, **sampling: Any
) -> Ask:
    extra = sampling.pop("extra", {})
    shown = {"logprobs": 3, "detokenize": True, **sampling}
    return Ask(prompt(first, second, lead=LEAD, query=query), max_tokens=12, extra=extra, sampling=shown)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        tiny_models.save_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def engine(
    module_engine: EngineFactory, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("options")
    run_apart(tiny_models.save, path, "Qwen3", {"num_hidden_layers": 1}, log=engine_logs / "models.log")
    with module_engine(
        path,
        dtype="float32",
        mended=register_parser,
        reasoning_parser="words",
        logits_processors=[NAME],
        enable_lora=True,
        max_loras=2,
    ) as started:
        yield started


def register_parser() -> None:
    """Make a reasoning parser of these models' words known."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    class Words(BaseThinkingReasoningParser):
        start_token, end_token = f"w{THINK}", f"w{THOUGHT}"

    ReasoningParserManager.register_module("words", force=True, module=Words)


def as_ordinary(engine: Engine, asked: Ask) -> Answer:
    """The answer: that of the ordinary request and of ``full``, whoever computed the records."""
    params = asked.plain().sampling
    plain = Ask(asked.plain().tokens, asked.max_tokens, asked.extra, sampling=params)
    full = Ask(asked.tokens, asked.max_tokens, asked.extra | FULL, sampling=params)
    cold, warm, without, computed = engine.ask_one_by_one(asked, asked, plain, full)
    assert warm.cached > 200 and same(computed, without)
    for one in (cold, warm):
        assert one.samples == without.samples and one.reasons == without.reasons
    assert cold.logprobs == warm.logprobs
    return warm


def test_words_that_end_or_are_forbidden(engine: Engine) -> None:
    free = as_ordinary(engine, ask())
    word = f"w{free.tokens[4]}"
    stopped = as_ordinary(engine, ask(stop=[word]))
    assert stopped.tokens == free.tokens[: len(stopped.tokens)] and stopped.reasons == ("stop",)
    without = as_ordinary(engine, ask(bad_words=[word]))
    assert free.tokens[4] not in without.tokens
    pair = f"w{free.tokens[3]} {word}"
    assert as_ordinary(engine, ask(bad_words=[pair])).tokens[:4] == free.tokens[:4]


def test_a_processor_of_ones_own_sees_the_whole_prompt(engine: Engine) -> None:
    """Beside others, too, and with the answers' tokens."""
    free, ours = as_ordinary(engine, ask()), ask(extra={FAVOUR: 3.0})
    favoured = as_ordinary(engine, ours)
    assert favoured.tokens != free.tokens
    together = engine.ask(ask(), ours, ask(SECOND, FIRST, extra={FAVOUR: 1.0}), ours.plain(), ours)
    assert together[1].tokens == together[4].tokens == favoured.tokens


def structured(**kind: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**kind)}


def within(segment: list[int], at: int, *words: int) -> list[int]:
    return [*segment[:at], *words, *segment[at + len(words) :]]


CHOICES = ["w401", "w402"]


@pytest.mark.parametrize(
    ("first", "query", "reasons"),
    [
        pytest.param(within(FIRST, 60, THINK, THOUGHT), QUERY, False, id="ended-in-a-record"),
        pytest.param(within(FIRST, 60, THINK), QUERY, True, id="begun-in-a-record"),
        pytest.param(within(FIRST, 60, THINK), within(QUERY, 3, THOUGHT), False, id="ended-in-the-query"),
        pytest.param(within(FIRST, 60, THOUGHT), within(QUERY, 3, THINK), True, id="begun-in-the-query"),
        pytest.param(
            within(within(FIRST, 1, THOUGHT), 60, THINK), QUERY, True, id="ended-in-a-seam-begun-in-a-record"
        ),
    ],
)
def test_grammars_begin_behind_reasoning(
    engine: Engine, first: list[int], query: list[int], reasons: bool
) -> None:
    """A word of a segment counts as in an ordinary prompt, whether it is in the stream or in a record."""
    answer = as_ordinary(engine, ask(first, query=query, **structured(choice=CHOICES)))
    assert (answer.tokens[0] not in (401, 402)) == reasons


@pytest.mark.parametrize(("end", "forced"), [((), True), ((THOUGHT,), False)], ids=["open", "closed"])
def test_a_budget_of_reasoning_counts_what_a_record_holds(
    engine: Engine, end: tuple[int, ...], forced: bool
) -> None:
    first = within(FIRST, 60, THINK, *end)
    answer = as_ordinary(engine, ask(first, thinking_token_budget=5))
    assert (answer.tokens[0] == THOUGHT) == forced


@pytest.mark.parametrize("kind", [{"choice": CHOICES}, {"regex": r"w4\d\d"}], ids=["choice", "regex"])
def test_grammars(engine: Engine, kind: dict[str, Any]) -> None:
    ended = [THOUGHT, *QUERY]
    answer = as_ordinary(engine, ask(query=ended, ignore_eos=False, **structured(**kind)))
    assert 400 <= answer.tokens[0] < 480 and len(answer.tokens) == 2


def with_adapter(llm: Any, ask: Ask, name: str, folder: str) -> Answer:
    """The answer of the model with an adapter."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest(name, 1 + ADAPTERS.index(name), f"{folder}/{name}")
    entry = {"prompt_token_ids": list(ask.tokens)}
    return answer_of(llm.generate([entry], sampling_params(ask), lora_request=adapter, use_tqdm=False)[0])


def test_adapters_have_records_of_their_own(engine: Engine, adapters: Path) -> None:
    engine.reset()
    asked = ask()
    base = as_ordinary(engine, asked)
    found = {}
    for name in ADAPTERS:
        cold, warm, plain = (
            engine.call(with_adapter, one, name, str(adapters)) for one in (asked, asked, asked.plain())
        )
        assert cold.cached == 0 and warm.cached > 200
        assert cold.logprobs == warm.logprobs
        assert cold.tokens == plain.tokens
        found[name] = cold.tokens
    assert len({base.tokens, *found.values()}) == 3
    assert as_ordinary(engine, asked).tokens == base.tokens
