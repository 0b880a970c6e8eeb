"""A verdict for every kind of numbers, with the reason that decides."""

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from vllm_hypic.eval.gate.criteria import (
    ANSWERS,
    DISTRIBUTIONS,
    FAULTS,
    FIRST_TOKENS,
    TEXTS,
    Answers,
    Distances,
    Judgement,
    Limits,
    Numbers,
    Reuse,
    Texts,
    Verdict,
    judge,
)
from vllm_hypic.eval.runner import MethodAnswer

from .gate_numbers import FINE, NOISE, answers, numbers

LIMITS = Limits()


def fails(found: Numbers, limits: Limits = LIMITS) -> list[str]:
    """Criteria that do not hold; the verdict must follow from them."""
    judgement = judge(found, limits)
    names = [r.criterion for r in judgement.reasons if r.holds is False]
    assert (judgement.verdict is Verdict.NO_GO) == bool(names)
    assert [r.criterion for r in judgement.against] == names or judgement.verdict is Verdict.CANNOT_JUDGE
    return names


def test_all_is_well() -> None:
    judgement = judge(numbers(), LIMITS)
    assert judgement.verdict is Verdict.GO
    assert [r.criterion for r in judgement.reasons] == [FAULTS, ANSWERS, DISTRIBUTIONS, FIRST_TOKENS]
    assert all(r.holds for r in judgement.reasons) and not judgement.against


@pytest.mark.parametrize(
    ("beyond", "criterion", "says"),
    [
        ({"faults": ("cold differs from warm",)}, FAULTS, "cold differs from warm"),
        ({"reuse": Reuse(0, 3000)}, FAULTS, "0 of 3000 reusable tokens were reused, 0.0 %"),
        ({"reuse": Reuse(2840, 3000)}, FAULTS, "94.7 %; at least 95 % are expected"),
        ({"reuse": Reuse(0, 0)}, FAULTS, "all segments are too short"),
        ({"answers": (answers(400, 300, lost=40, gained=22),)}, ANSWERS, "4.5 lost"),
        ({"answers": (answers(lost=14),)}, ANSWERS, "more than 1 are certainly lost"),
        ({"distances": replace(FINE, kl_p90=0.21)}, DISTRIBUTIONS, "within 0.21 nats"),
        ({"distances": replace(FINE, changed=5.1)}, FIRST_TOKENS, "5.1 % of the 95 first tokens"),
    ],
)
def test_one_criterion_that_fails_is_a_no_go(beyond: dict[str, Any], criterion: str, says: str) -> None:
    found = numbers(**beyond)
    assert fails(found) == [criterion]
    [reason] = judge(found, LIMITS).against
    assert says in reason.says


def test_what_is_just_within_a_limit_is_a_go() -> None:
    for within in (
        {"answers": (answers(lost=2),)},
        {"answers": (answers(lost=6, gained=4),)},
        {"reuse": Reuse(2860, 3000)},
        {"distances": replace(FINE, kl_p90=0.19, kl_median=0.19)},
        {"distances": replace(FINE, changed=4.9)},
    ):
        assert judge(numbers(**within), LIMITS).verdict is Verdict.GO, within


def test_losses_that_may_be_chance_and_losses_that_are_certain() -> None:
    found = numbers(answers=(answers(96, 70, lost=14, gained=6),))
    judgement = judge(found, LIMITS)
    assert judgement.verdict is Verdict.GO and found.answers[0].loss.value > LIMITS.loss
    [reason] = [r for r in judgement.reasons if r.criterion == ANSWERS]
    assert "8.3 lost" in reason.says and "this loss may be chance" in reason.says
    # Of many prompts: the mean is within its limit, and all of the interval beyond the other one.
    found = numbers(answers=(answers(4000, 3900, lost=100),))
    [reason] = judge(found, LIMITS).against
    assert reason.criterion == ANSWERS and reason.measured is not None
    assert reason.measured > LIMITS.certain_loss and found.answers[0].loss.value < LIMITS.loss
    assert fails(numbers(answers=(answers(4000, 3900, lost=40),))) == []


def test_answers_that_say_nothing() -> None:
    # Full recompute answers too little: neither go nor no-go, whatever reuse answers, and whatever its
    # distributions are; only faults and texts condemn.
    silent = (answers(right=18, lost=18),)
    judgement = judge(numbers(answers=silent), LIMITS)
    assert judgement.verdict is Verdict.CANNOT_JUDGE
    [reason] = judgement.against
    assert "scores 18.8 points, less than 20, so no loss can show" in reason.says
    far = judge(numbers(answers=silent, distances=replace(FINE, kl_p90=1.0)), LIMITS)
    assert far.verdict is Verdict.CANNOT_JUDGE and far.against == [reason]
    assert judge(numbers(answers=silent, texts=(texts(3.0),)), LIMITS).verdict is Verdict.NO_GO
    assert judge(numbers(answers=silent, faults=("broken",)), LIMITS).verdict is Verdict.NO_GO


def texts(percent: float) -> Texts:
    full = [2.0, 3.0, 2.5]
    return Texts.of("mixed", full, [nll * (1 + percent / 100) for nll in full])


def test_texts_that_become_less_likely_are_a_no_go() -> None:
    assert fails(numbers(texts=(texts(1.9),))) == []
    found = numbers(texts=(texts(0.5), texts(2.1)))
    assert fails(found) == [TEXTS]
    [reason] = judge(found, LIMITS).against
    assert "mixed: 2.500 nats a token recomputed, 2.552 reused: +2.1 %" in reason.says
    assert "at most 2 % more is allowed" in reason.says


def test_one_set_that_tells_is_enough_and_each_is_judged() -> None:
    silent, own = answers(right=2), answers(name="my.jsonl")
    assert judge(numbers(answers=(silent, own)), LIMITS).verdict is Verdict.GO
    lost = answers(40, 40, name="my.jsonl", lost=8)
    [reason] = judge(numbers(answers=(answers(), lost)), LIMITS).against
    assert reason.says.startswith("my.jsonl, exact match: 100.0 points recomputed, 80.0 reused")


def test_ties_and_faults_beside_missing_numbers() -> None:
    # Ties may fall either way: that is no loss.
    judgement = judge(numbers(distances=replace(FINE, sure=0, changed=0.0, agreement=60.0)), LIMITS)
    assert judgement.verdict is Verdict.GO
    assert [r.holds for r in judgement.reasons if r.criterion == FIRST_TOKENS] == [None]
    # Numbers missing after a fault.
    assert fails(Numbers(faults=("link method 'naive' ... has none",))) == [FAULTS]
    judgement = judge(numbers(answers=(answers(right=2),)), LIMITS)
    assert Judgement.from_mapping(json.loads(json.dumps(dataclasses.asdict(judgement)))) == judgement


def test_limits_are_those_given_and_noise_widens_them() -> None:
    found = numbers(answers=(answers(lost=14),), distances=replace(FINE, kl_p90=0.5))
    assert fails(found, Limits(loss=50, certain_loss=50, kl=1.0)) == []
    far = replace(FINE, kl_p90=0.22, changed=14.0)
    assert fails(numbers(distances=far)) == [DISTRIBUTIONS, FIRST_TOKENS]
    assert fails(numbers(distances=far, noise=replace(NOISE, kl_p90=0.05, changed=10.0))) == []


def test_points_and_distances() -> None:
    found = Answers.of("set", "F1", [1.0, 0.5, 0.75, 0.75], [0.5, 0.5, 0.75, 0.75])
    assert (found.full, found.reuse) == (75.0, 62.5)
    assert found.loss.value == 12.5 and found.loss.n == 4
    # Distances are of all prompts and of those that are sure.
    full = [outcome(0.9, 0.1)] * 8 + [outcome(0.49, 0.48)] * 2
    same = Distances.of(full, full)
    assert (same.prompts, same.kl_p90, same.agreement, same.changed) == (10, 0, 100, 0)
    # One sure first token changes, and both of the others.
    found = Distances.of(full, [outcome(0.1, 0.9), *full[1:8], *[outcome(0.48, 0.49)] * 2])
    assert (found.sure, found.changed, found.agreement) == (8, 12.5, 70)
    gap = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    assert found.kl_median == 0 and found.kl_p90 == pytest.approx(0.01 * math.log(49 / 48))
    assert found.kl_mean == pytest.approx((gap + 2 * found.kl_p90) / 10)


def outcome(*probabilities: float) -> MethodAnswer:
    """First-token probabilities of tokens 0, 1, ..."""
    return MethodAnswer("", (), {i: math.log(p) for i, p in enumerate(probabilities)}, 10, 5)
