"""What probes make of what they saw: aggregation, zones, composition, options."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from benchmarks.answers.methods import link_method
from benchmarks.lib.stats import relative
from benchmarks.probes import dtype
from benchmarks.probes.attention import Profile, _deviation, _Tokens, token_deviation, zones
from benchmarks.probes.drift import aggregate
from benchmarks.probes.engine_calls import Observation
from benchmarks.probes.engine_pair import MethodRun, Probe, PromptRuns, make_prompts, require_long
from vllm_hypic.backends.ops.gated_delta.reference import DeltaTokens
from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness.fidelity import distance
from vllm_hypic.harness.generators import EXAMPLE, find_generator
from vllm_hypic.harness.settings import EngineSettings


def probe(*methods: str) -> Probe:
    settings = EngineSettings(model=Path("nowhere"), threads=1)
    return Probe(settings, tuple(map(link_method, methods)), prompts=2, seed=0, noise_chunk=200)


def test_deviations_are_relative() -> None:
    reference = np.array([[3.0, 0.0], [0.0, 4.0]], dtype=np.float32)
    assert relative(reference, reference) == 0
    assert relative(2 * reference, reference) == pytest.approx(1)
    assert relative(np.zeros(3), np.zeros(3)) == 0
    # A token of nearly no V must not look as if it deviated without bounds.
    reference = np.array([[3.0, 4.0], [0.0, 1e-9], [3.0, -4.0], [0.0, 0.0]])
    other = reference + np.array([[0.5, 0], [0.5, 0], [0, 0], [0, 0]])
    typical = math.sqrt((25 + 0 + 25 + 0) / 4)
    assert token_deviation(other, reference) == pytest.approx([0.5 / typical] * 2 + [0, 0])
    # What the question sees is weighed and shared out.
    weighed = np.zeros((2, 64))
    weighed[0, 0] = weighed[1, 15] = 0.3  # first quarters
    weighed[0, 16] = 0.1
    weighed[1, 63] = 0.3
    found = _deviation("block", "layer", [_Tokens(weighed, weighed, weighed)])
    assert found.seen.value == pytest.approx(1.0)
    assert found.seen_head.value == pytest.approx(0.6)
    assert found.seen_tail.value == pytest.approx(0.3)


def seen(*states: float, computed: int = 10) -> Observation:
    found = [np.full((1, 2, 2), s, dtype=np.float32) for s in states]
    return Observation({}, 0, computed, found, [np.ones(3)])


def run(value: Observation, gap: float = 0.0) -> MethodRun:
    reference = {0: math.log(0.6), 1: math.log(0.4)}
    return MethodRun(value, distance(reference, {0: reference[0] - gap, 1: reference[1]}))


def test_drift_is_told_by_method_and_by_layer() -> None:
    prompt = Prompt((1,), ((2,),), (3,))
    runs = [
        PromptRuns(prompt, seen(1, 2), run(seen(1, 2.002)), (run(seen(1.01, 3), 0.25), run(seen(2, 2), 1.0))),
        PromptRuns(prompt, seen(1, 4), run(seen(1, 4.004)), (run(seen(1.03, 6), 0.75), run(seen(2, 4), 1.0))),
    ]
    truths = [np.full((1, 2, 2), 1.0), np.full((1, 2, 2), 2.0)]
    full, noise, one, other = aggregate(["full", "noise", "one", "other"], runs, truths)
    assert [m.value for m in full.states] == [0, 0]
    assert full.truth is not None and full.truth.value == pytest.approx((0 + 0.5) / 2)
    assert [m.value for m in noise.states] == pytest.approx([0, 0.001], abs=1e-6)
    assert [m.value for m in one.states] == pytest.approx([0.02, 0.5], abs=1e-6)
    assert one.max_abs.value == pytest.approx(0.5)
    assert other.truth is not None and other.truth.value == pytest.approx((1 + 0) / 2)
    # A gap of one nat swaps the two tokens, one of a quarter does not.
    assert (noise.agreement.value, other.agreement.value, one.agreement.value) == (1, 0, 0.5)
    # Without linear layers there is no drift of states.
    dense = replace(seen(), states=[])
    [full, _] = aggregate(["full", "noise"], [PromptRuns(prompt, dense, run(dense), ())], None)
    assert full.states == () and len(full.hidden) == 1 and full.truth is None


@pytest.mark.parametrize("tokens", [64, 65, 96, 128, 1000])
def test_zones_are_neighbours_and_end_in_the_middle(tokens: int) -> None:
    found = zones(tokens)
    assert found[0].first == 0 and found[-1].stop == min(64, tokens // 2)
    assert all(a.stop == b.first < b.stop for a, b in pairwise(found))
    assert [str(z) for z in zones(64)] == ["0", "1", "2-3", "4-7", "8-15", "16-31"]


def test_a_profile_counts_distances_from_either_end() -> None:
    falling = np.arange(128, 0, -1.0)
    found = Profile.of([np.stack([falling, falling + 2])])
    assert found.head_curve[:3] == (129, 128, 127)
    assert found.tail_curve[:3] == (2, 3, 4)
    assert [m.value for m in found.head[:3]] == [129, 128, 126.5]
    assert [m.value for m in found.tail[:3]] == [2, 3, 4.5]
    assert found.middle.value == pytest.approx(falling[32:96].mean() + 1)


def inputs(tokens: int, *, heads: int = 2, size: int = 8) -> DeltaTokens:
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=rng, dtype=torch.float64)

    gates = -torch.rand(tokens, heads, generator=rng, dtype=torch.float64) / 20
    keys = draw(1, size), draw(1, size)
    return DeltaTokens(*keys, v=draw(heads, size), beta=draw(heads).sigmoid(), g=gates, eps=1e-6)


@pytest.mark.parametrize(("head", "tail"), [(0, 0), (8, 8), (16, 0)])
def test_exact_summaries_compose_to_the_exact_state(head: int, tail: int) -> None:
    whole, bounds = inputs(130), [(10, 60), (60, 120)]
    inner = [slice(a + head, b - tail) for a, b in bounds]
    exact = [(whole[i].transition(), whole[i].state()) for i in inner]
    truth = whole.state().numpy()
    assert relative(dtype.compose(whole, bounds, inner, exact).numpy(), truth) < 1e-14
    rounded = [(t.half(), s) for t, s in exact]
    assert 1e-6 < relative(dtype.compose(whole, bounds, inner, rounded).numpy(), truth) < 1e-3
    naive = [(torch.eye(8, dtype=torch.float64).expand_as(t), s) for t, s in exact]
    assert relative(dtype.compose(whole, bounds, inner, naive).numpy(), truth) > 0.1


def test_segments_that_would_not_be_reused_are_refused() -> None:
    require_long(probe("hypic-16", "epic-32"), 64)
    with pytest.raises(click.UsageError, match="hypic-17 recomputes 34 of them"):
        require_long(probe("hypic-8", "hypic-17"), 64)


def test_prompts_are_the_demo_models_questions_or_random() -> None:
    demo = find_generator(EXAMPLE / "model")
    for generator in (demo, None):
        prompts, again = (make_prompts(generator, range(10, 400), 2, 3, 64, seed=5) for _ in range(2))
        assert prompts == again and prompts[0] != prompts[1]
        assert all([len(d) for d in p.documents] == [64] * 3 for p in prompts)
    assert make_prompts(demo, [], 1, 2, 64, 5)[0].question[0] == 5  # "?"
