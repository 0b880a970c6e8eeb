"""Answers that are given: the likelihood of each token is that which the model would have given it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from vllm_hypic.harness.engine_calls import FORCING, Ask
from vllm_hypic.harness.engines import Engine, EngineError, running
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.harness.prompts import Prompt, Writer
from vllm_hypic.harness.settings import EngineSettings

pytestmark = pytest.mark.engine
SETTINGS = EngineSettings(EXAMPLE / "model", threads=1, eager=True, kv_gib=0.25)
FORCED = (40, 7, 7, 123, 300)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine(SETTINGS, 1024, hypic=True, logits_processors=[FORCING])
    with running(found):
        yield found


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> Prompt:
    return Writer(engine.vocabulary, 3).prompt(3, 64, head=40, question=9)


def test_every_token_is_as_likely_as_if_it_were_asked_for_alone(engine: Engine, prompt: Prompt) -> None:
    for tokens in (prompt.plain(), prompt.marked(engine.separator)):
        found = engine.ask(Ask(tokens, forced=FORCED))
        assert found.tokens == FORCED
        for i, token in enumerate(FORCED):
            alone = engine.ask(Ask([*tokens, *FORCED[:i]], logprobs_of=[token]))
            # One token at a time is summed in another order than a prompt, and bf16 is coarse at such logits.
            assert found.forced[i] == pytest.approx(alone.logprobs[token], abs=0.3)
        steps = [abs(a - b) for a, b in pairwise(found.forced)]
        assert max(steps) > 1, "the tolerance tells one place from the next"


def test_what_the_model_says_itself_is_told_bit_for_bit(engine: Engine, prompt: Prompt) -> None:
    """Others in the batch are left alone, and tokens that are compared are still reported."""
    tokens = prompt.marked(engine.separator)
    own = engine.ask(Ask(tokens, max_tokens=3))
    again = engine.ask(Ask(tokens, forced=own.tokens, logprobs_of=[5, 6]))
    assert again.tokens == own.tokens
    assert again.forced[0] == own.logprobs[own.tokens[0]]
    assert {5, 6} <= again.logprobs.keys()
    assert engine.ask(Ask(tokens, max_tokens=3)).tokens == own.tokens


def test_an_engine_that_cannot_force_says_so(prompt: Prompt) -> None:
    with (
        pytest.raises(EngineError, match="without FORCING"),
        running(found := Engine(SETTINGS, 1024, hypic=False)),
    ):
        found.ask(Ask(prompt.plain(), forced=FORCED))
