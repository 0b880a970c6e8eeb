"""Speculative decoding of models with linear layers: what is behind every draft has a slot of its own, so
that drafts change no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle import save_mamba2_model, save_olmo_model, save_short_conv_model

from .conftest import EngineFactory, lent
from .engines import Answer, Engine, audit, poison_cache, run_apart, same
from .test_drafts import ANSWER, ARGS, NGRAMS, asks, by_full, counts, preemptions, watched

LAYERS = ["linear_attention", "full_attention"] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, engine_logs: Path) -> Path:
    """OLMo-Hybrid, of which all rows are ours on CPUs, in float32."""
    save = partial(save_olmo_model, layer_types=LAYERS)
    return run_apart(save, tmp_path_factory.mktemp("olmo"), log=engine_logs / "models.log")


@pytest.fixture(scope="module")
def engines(module_engine: EngineFactory, model: Path) -> dict[str, Engine]:
    args = ARGS | {"num_gpu_blocks_override": 40}
    return {
        "drafting": module_engine(model, speculative_config=NGRAMS, **args),
        "plain": module_engine(model, **args),
    }


@pytest.fixture
def drafting(engines: dict[str, Engine]) -> Iterator[Engine]:
    yield from lent(engines["drafting"])


@pytest.fixture
def plain(engines: dict[str, Engine]) -> Iterator[Engine]:
    yield from lent(engines["plain"])


def test_answers_are_those_without_drafts(drafting: Engine, plain: Engine) -> None:
    for ask in asks():
        for asked in (ask, ask.plain(), by_full(ask)):
            [expected] = plain.ask(asked)
            answer, drafted = watched(drafting, asked)
            assert answer.tokens == expected.tokens
            assert 0 < drafted.accepted < drafted.tokens, drafted


def test_cold_and_warm_are_bit_identical(drafting: Engine) -> None:
    for ask in asks():
        cold, warm = watched(drafting, ask), watched(drafting, ask)
        assert same(cold[0], warm[0]) and cold[1] == warm[1]
        assert warm[0].cached > cold[0].cached


def test_requests_side_by_side(drafting: Engine, plain: Engine) -> None:
    """Some have drafts, some none, some begin or are computed anew."""
    side_by_side = [*asks(1, 160), *(ask.plain() for ask in asks(2, 160))]
    expected = plain.ask_one_by_one(*side_by_side)
    stopped = drafting.call(preemptions)
    answers = drafting.ask(*side_by_side)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert drafting.call(preemptions) > stopped, "there was room for all: nothing is shown"


def go_on_behind_the_first(llm: Any) -> None:
    """Plant a fault: what was accepted is forgotten."""
    from vllm_hypic.backends.linear.gdn.cpu import CPUDeltaNet

    stock = CPUDeltaNet.drafted

    def forgetful(self: Any, metadata: Any) -> Any:
        found = stock(self, metadata)
        return found and replace(found, before=found.behind[:, 0])

    CPUDeltaNet.drafted = forgetful  # type: ignore[method-assign]


def test_states_at_ends_of_blocks(start_engine: EngineFactory, model: Path, plain: Engine) -> None:
    """Second turns go on from states that stood within passes with drafts; and a planted fault is seen."""
    # All ends of blocks, of answers, too.
    args = ARGS | {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    drafting = start_engine(model, speculative_config=NGRAMS, **args | {"num_gpu_blocks_override": 80})
    ask = asks(3, 200)[0]
    expected = plain.ask_one_by_one(ask, ask.plain())
    for asked, wanted in zip((ask, ask.plain()), expected, strict=True):
        answer, drafted = watched(drafting, asked)
        assert answer.tokens == wanted.tokens and drafted.accepted > 0
        turn = replace(asked, tokens=(*asked.tokens, *answer.tokens, *asked.tokens[-7:]), max_tokens=ANSWER)
        [second], [fresh] = drafting.ask(turn), plain.ask(turn)
        assert second.tokens == fresh.tokens
    assert second.cached > len(asked.tokens)
    drafting.call(go_on_behind_the_first)
    assert drafting.ask(ask)[0].tokens != expected[0].tokens


OTHERS: dict[str, Callable[..., Any]] = {
    "NemotronH": partial(save_mamba2_model, name="NemotronH"),
    "FalconH1": partial(save_mamba2_model, name="FalconH1"),
    "Lfm2": partial(save_short_conv_model, layer_types=["conv", "full_attention", "conv"]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.fast("NemotronH", "Lfm2")
def test_other_linear_layers(
    name: str, start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """Mamba2 and short convolutions, whose rows are stock code's, in float32 and with a prefix cache."""
    folder = run_apart(OTHERS[name], tmp_path, log=engine_logs / "models.log")
    args = ARGS | {"num_gpu_blocks_override": 80}
    chosen = [*asks(1)[:2], *(ask.plain() for ask in asks(2)[:2])]
    with start_engine(folder, **args) as plain:
        expected = plain.ask_one_by_one(*chosen)
    cached = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    drafting = start_engine(folder, speculative_config=NGRAMS, **args | cached)
    before = drafting.call(counts)
    cold = drafting.ask_one_by_one(*chosen)
    _, tokens, accepted = (b - a for a, b in zip(before, drafting.call(counts), strict=True))
    assert 0 < accepted < tokens
    assert [a.tokens for a in cold] == [a.tokens for a in expected]
    warm = drafting.ask_one_by_one(*chosen[:2])
    assert [a.tokens for a in warm] == [a.tokens for a in cold[:2]]
    drafting.reset()
    assert [a.tokens for a in drafting.ask(*chosen)] == [a.tokens for a in expected]
    left = drafting.call(audit)
    assert left.clean, left


CLOSE = 0.15
"""Of logprobs of two tokens that bfloat16 may confuse."""


def alike(answer: Answer, wanted: Answer) -> bool:
    """Whether all tokens are the same; otherwise the first that differs is as good as the other, or this
    fails."""
    apart = [i for i in range(ANSWER) if answer.tokens[i] != wanted.tokens[i]]
    if apart:
        i = apart[0]
        ours, theirs = (a.logprobs[0][i][a.tokens[i]] for a in (answer, wanted))
        assert abs(ours - theirs) < CLOSE
    return not apart


def test_stock_rows_of_qwen(start_engine: EngineFactory, hybrid_model: Path, hypic: Engine) -> None:
    """Where stock code runs the rows, in bfloat16: answers are those without drafts until two tokens are as
    good as each other."""
    args = {"speculative_config": NGRAMS, "disable_log_stats": False}
    drafting = start_engine(hybrid_model, mended=poison_cache, **args)
    chosen = [*asks(1)[:2], *(ask.plain() for ask in asks(2)[:2])]
    expected, before = hypic.ask_one_by_one(*chosen), drafting.call(counts)
    cold, warm = drafting.ask_one_by_one(*chosen), drafting.ask_one_by_one(*chosen)
    side_by_side = drafting.ask(*chosen)
    assert all(map(same, cold[:2], warm[:2]))
    same_tokens = sum(map(alike, [*cold, *side_by_side], [*expected, *expected]))
    assert 2 * same_tokens > len(chosen)
    _, tokens, accepted = (b - a for a, b in zip(before, drafting.call(counts), strict=True))
    assert 0 < accepted < tokens
