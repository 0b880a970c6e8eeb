"""The model's passes against its float64 oracle, and the oracle against what must hold of it."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import gate, layers, oracle
from benchmarks.gpu.composed import ComposedPass, Composition, Pool, SegmentPass
from benchmarks.gpu.drift import measure_drift
from benchmarks.gpu.gate import relative
from benchmarks.gpu.layers import Prefill, Stack
from benchmarks.gpu.operators import TorchOperators
from benchmarks.gpu.shapes import TINY
from vllm_hypic.backends.ops.program import Mode
from vllm_hypic.primitives.keys import Namespace
from vllm_hypic.primitives.pieces import parse_prompt
from vllm_hypic.primitives.plan import PoolLimits, build_plan
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.primitives.tokens import PrimitiveIds

CPU = torch.device("cpu")
OPERATORS = TorchOperators()
PROMPT = Composition(segments=3, length=26, query=5, window=4)
FP32 = 2e-4
"""T is stored in fp16."""


@pytest.fixture(scope="module")
def stack() -> Stack:
    return Stack.random(TINY, 200, torch.float32, CPU, seed=3)


def tokens_of(prompt: Composition) -> torch.Tensor:
    return torch.randint(0, TINY.vocabulary, (prompt.tokens,), generator=torch.Generator().manual_seed(1))


def records(stack: Stack, prompt: Composition, parts: list[range]) -> Pool:
    pool = Pool.empty(stack, prompt)
    for layer in pool.attention.values():
        layer.key.fill_(torch.nan), layer.value.fill_(torch.nan)
    segments = tokens_of(prompt)[: prompt.segments * prompt.length].view(prompt.segments, prompt.length)
    for part in parts:
        SegmentPass(stack, prompt, pool, part, OPERATORS).run(segments[part.start : part.stop])
    return pool


def errors(run: ComposedPass, prompt: Composition, truth: oracle.Truth) -> list[float]:
    logits = relative(run.run(tokens_of(prompt)), truth.logits)
    return [logits, *(relative(run.state(i), state) for i, state in truth.states.items())]


@pytest.mark.parametrize("chunk", [7, 50, 1000])
def test_full_recompute(stack: Stack, chunk: int) -> None:
    tokens = tokens_of(PROMPT)
    truth = oracle.full(stack, tokens)
    prefill = Prefill.of(stack, tokens, OPERATORS)
    assert relative(prefill.run(chunk), truth.logits) < 2e-6
    for layer, state in truth.states.items():
        assert relative(prefill.state(layer), state) < 2e-6


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        replace(PROMPT, segments=1, query=1),
        replace(PROMPT, window=0),
        replace(PROMPT, window=1),  # shorter than the convolution reaches
        replace(PROMPT, length=11),  # an interior of three tokens
    ],
    ids=str,
)
def test_composed(stack: Stack, prompt: Composition) -> None:
    pool = records(stack, prompt, [range(prompt.segments)])
    truth = oracle.composed(stack, prompt, tokens_of(prompt))
    assert max(errors(ComposedPass(stack, prompt, pool, OPERATORS), prompt, truth)) < FP32


def test_segments_do_not_see_each_other(stack: Stack) -> None:
    """However they share passes, records are the same, in every layer."""
    together = records(stack, PROMPT, [range(3)])
    apart = records(stack, PROMPT, [range(2, 3), range(0, 2)])
    for i, layer in together.attention.items():
        slots = together.slots.flatten()
        torch.testing.assert_close(layer.key[slots], apart.attention[i].key[slots])
        torch.testing.assert_close(layer.value[slots], apart.attention[i].value[slots])
    for i, layer in together.delta.items():
        torch.testing.assert_close(layer.state, apart.delta[i].state)


@pytest.mark.parametrize("fault", ["no transition", "wrong rotation", "stale context", "blind"])
def test_faults_show(stack: Stack, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = oracle.composed(stack, PROMPT, tokens_of(PROMPT))
    pool = records(stack, PROMPT, [range(3)])
    mode = Mode.ADD if fault == "no transition" else Mode.TRANSITION
    if fault == "wrong rotation":
        offsets = torch.arange(PROMPT.window, PROMPT.length - PROMPT.window).repeat(PROMPT.segments)
        monkeypatch.setattr(Composition, "kv_positions", lambda self: offsets)
    elif fault == "stale context":
        for layer in pool.delta.values():
            layer.conv_tail.zero_()
    elif fault == "blind":
        monkeypatch.setattr(Composition, "interior", 1)  # of every segment, a column is seen
    run = ComposedPass(stack, PROMPT, pool, OPERATORS, mode)
    assert max(errors(run, PROMPT, truth)) > 10 * FP32


def test_the_oracle_agrees_with_full_recompute_where_it_must(stack: Stack) -> None:
    # Its inputs are embeddings, which know no context; deeper layers differ.
    tokens = tokens_of(PROMPT)
    full, composed = oracle.full(stack, tokens), oracle.composed(stack, PROMPT, tokens)
    assert relative(composed.states[0], full.states[0]) < 1e-12
    assert relative(composed.states[2], full.states[2]) > 1e-3
    # A prefix's logits do not depend on what follows: full recompute of it gives the same.
    one = oracle.full(stack, tokens[:20])
    alone = replace(PROMPT, segments=1, length=20, query=1, window=2)
    # A prompt whose only segment is followed by one token sees the segment as full recompute does.
    both = [oracle.full(stack, tokens[:21]), oracle.composed(stack, alone, tokens[:21])]
    assert relative(both[0].logits, both[1].logits) < 1e-12
    assert relative(both[0].logits, one.logits) > 1e-3


def test_streams_are_those_of_the_plugin() -> None:
    """Same tokens, positions, compose points and columns as `primitives.plan` makes of such a prompt."""
    sep = 1000
    tokens = list(range(PROMPT.tokens))
    L = PROMPT.length
    marked = [sep]
    for i in range(PROMPT.segments):
        marked += [*tokens[i * L : (i + 1) * L], sep]
    marked += tokens[PROMPT.segments * L :]
    limits = PoolLimits(pages=100, slots=10, page_tokens=16, max_request_tokens=1000)
    plan = build_plan(
        parse_prompt(marked, PrimitiveIds(sep, 1001, 1002)),
        parse_link("hypic", PROMPT.window),
        Namespace.from_config({}),
        limits,
        min_segment_tokens=1,
    )
    assert list(plan.positions) == PROMPT.positions().tolist() == list(plan.stream)
    operations = PROMPT.operations()
    assert [s.compose_at for s in plan.segments] == [op.first + op.tokens for op in operations[:-1]]
    columns = [s.start + offset for s in plan.segments for part in s.parts for offset in s.offsets_of(part)]
    assert columns == PROMPT.kv_positions().tolist()
    assert operations[-1].first + operations[-1].tokens == len(plan.stream)


def test_prompts_that_cannot_be(stack: Stack) -> None:
    short = replace(PROMPT, length=10)
    for make, message in (
        (lambda: Composition(2, 16, 5, 8), "segments of 16 tokens have no interior"),
        (lambda: Composition(0, 40, 5, 8), "0 segments"),
        (
            lambda: oracle.composed(stack, short, tokens_of(short)),
            "interiors of 2 tokens: the oracle needs at least 3",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_gate_passes_in_bf16_and_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        passed = gate.check_model(OPERATORS, CPU, torch.bfloat16)
    assert [d.planted for d in passed].count(True) == 1
    assert max(d.error for d in passed if not d.planted) < gate.TOLERANCE[torch.bfloat16] / 2
    with pytest.raises(gate.GateFailed, match=r"logits: nan, allowed are 0\.03"):
        gate.require([gate.Distance("logits", float("nan"), 0.03)])
    with pytest.raises(gate.GateFailed, match="expected more than"):
        gate.require([gate.Distance("fault", 0.01, 0.03, planted=True)])
    # Composition without T, unnoticed by the operators: the gate must notice.
    right = Composition.operations
    monkeypatch.setattr(Composition, "operations", lambda self, mode=Mode.ADD: right(self, Mode.ADD))
    with torch.inference_mode(), pytest.raises(gate.GateFailed, match="composed, state of layer 1"):
        gate.check_model(OPERATORS, CPU, torch.bfloat16)


def test_drift(stack: Stack) -> None:
    tokens = tokens_of(PROMPT)
    run = ComposedPass(stack, PROMPT, records(stack, PROMPT, [range(3)]), OPERATORS)
    drift = measure_drift(stack, PROMPT, tokens, run, OPERATORS, 1000, 30)
    assert [d.layer for d in drift.layers] == [0, 1, 2]
    assert drift.first_composed < FP32 and drift.first_full < 2e-6
    assert drift.layers[0].composed < FP32 < drift.layers[2].composed
    assert all(d.noise < 2e-6 for d in drift.layers)


@pytest.mark.slow  # torch.compile takes seconds to import
def test_compiled_layers_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU the graphs are only traced: no compiler runs."""
    small = Stack.random(replace(TINY, layers=2, period=2), 64, torch.float32, CPU)
    prompt = Composition(1, 20, 3, 4)
    tokens = tokens_of(prompt)
    functions = (layers._attention_in, layers._attention_out, layers._delta_in, layers._delta_out)
    traced = layers._Around(*(torch.compile(f, dynamic=True, backend="eager") for f in functions))
    monkeypatch.setattr(layers, "_compiled", lambda: traced)
    found = Prefill.of(small.compile(), tokens, OPERATORS).run(10)
    torch.testing.assert_close(found, Prefill.of(small, tokens, OPERATORS).run(10))
