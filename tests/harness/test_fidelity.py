"""Distances of first-token distributions."""

import math
from collections.abc import Callable

import pytest

from vllm_hypic.harness import gate
from vllm_hypic.harness.engine_calls import Answer
from vllm_hypic.harness.fidelity import TOP, Fidelity, distance, top
from vllm_hypic.primitives.policies import parse_link


def uniform(n: int) -> dict[int, float]:
    return dict.fromkeys(range(n), math.log(1 / n))


def test_only_the_references_top_tokens_count() -> None:
    found = distance(uniform(50), uniform(50))
    assert (found.max_abs, found.mean_abs, found.kl, found.same_argmax) == (0, 0, 0, True)
    reference = {i: math.log(0.04) if i < TOP else math.log(0.2 / 30) for i in range(50)}
    found = distance(reference, reference | {40: -1.0})
    assert found.max_abs == 0
    assert not found.same_argmax  # but the most likely token is looked for among all
    assert top({5: -3.0, 6: -1.0, 7: -2.0}) == [6, 7, 5]
    with pytest.raises(KeyError):  # a token that the other does not name
        distance({0: -0.1, 1: -3.0}, {0: -0.1})


def test_kl_is_that_of_the_two_way_split() -> None:
    """With one likely token and the rest lumped together, KL is that of two coins."""
    reference = {0: math.log(0.75)}
    other = {0: math.log(0.5)}
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert distance(reference, other).kl == pytest.approx(expected)


def test_fidelity_has_medians_worst_cases_and_agreement() -> None:
    reference = {0: math.log(0.6), 1: math.log(0.4)}
    swapped = {0: math.log(0.4), 1: math.log(0.6)}
    near = {0: math.log(0.59), 1: math.log(0.41)}
    found = Fidelity.of([distance(reference, d) for d in (reference, near, swapped)])
    assert found.agreement == pytest.approx(2 / 3)
    assert found.kl < found.kl_worst == pytest.approx(0.2 * math.log(1.5))
    assert found.prompts == 3


# -- the gate ----------------------------------------------------------------------------------------


def answer(cached: int = 0, logprobs: dict[int, float] | None = None) -> Answer:
    return Answer((7,), (0.5,), logprobs or {7: -1.0}, 100, cached)


SEAMS, ISLANDS = (parse_link("hypic", 8, "none", islands) for islands in ("none", "query-50"))


def test_what_passes() -> None:
    gate.require_same("answers", answer(), answer())
    gate.require_reuse(answer(cached=2 * (64 - 16)), 2, 64, SEAMS)
    gate.require_reuse(answer(cached=48), 2, 64, ISLANDS)
    gate.require_fresh(answer(), "stock")
    gate.require_close(distance({0: -0.1}, {0: -0.3}))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda: gate.require_same("answers", answer(), answer(logprobs={7: math.nextafter(-1.0, 0)})),
            "answers differ",
        ),
        (
            lambda: gate.require_reuse(answer(cached=95), 2, 64, SEAMS),
            "95 of 100 tokens were reused, expected at least 96",
        ),
        (
            lambda: gate.require_reuse(answer(cached=47), 2, 64, ISLANDS),
            "47 of 100 tokens were reused, expected at least 48",
        ),
        (lambda: gate.require_fresh(answer(cached=1), "stock"), "stock read 1 tokens"),
        (
            lambda: gate.checked_distance({3: -1.0}, {3: math.nan}, "hypic"),
            "the logprob of token 3 is nan",
        ),
        (lambda: gate.require_close(distance({0: -0.01}, {0: -20.0})), "a gross error"),
    ],
    ids=["one-bit", "reuse", "reuse-with-islands", "fresh", "not-a-number", "gross-error"],
)
def test_what_the_gate_refuses(call: Callable[[], object], why: str) -> None:
    with pytest.raises(gate.GateFailed, match=why):
        call()
