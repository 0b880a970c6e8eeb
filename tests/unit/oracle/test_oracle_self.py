"""The oracle is checked before it judges anything else.

Three kinds of evidence, none of which uses the plugin: transformers' own models; prompts for which
position-independent caching is exact by theorem; and planted faults, which must stand out from bf16 noise.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.oracle.faults import ATTENTION_FAULTS, FAULTS, STATE_FAULTS
from lib.oracle.models import random_segments, save_attention_model, save_hybrid_model
from lib.oracle.oracle import Compose, Oracle, build_stream
from lib.oracle.stream import Shown
from torch import Tensor

DEMO = Path(__file__).parents[3] / "examples" / "models" / "tiny-hybrid-qa" / "model"
PROMPTS = [random_segments([13, 28, 40, 22, 31, 6], seed=seed) for seed in range(3)]
LEADING, *SEGMENTS, QUERY = PROMPTS[0]
TOKENS = [token for part in PROMPTS[0] for token in part]
EXACT = 1e-9


def distance(p: Tensor, q: Tensor) -> float:
    """Largest difference between two log-probability tensors."""
    return (p - q).abs().max().item()


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p || q) of two log-probability vectors."""
    return (p.exp() * (p - q)).sum().item()


def transformers_logprobs(
    path: Path,
    tokens: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    mend: Callable[[Any], None] | None = None,
    changed: dict[str, Any] | None = None,
    **inputs: Any,
) -> Tensor:
    """Log-probabilities `[n, vocab]` of transformers' own model, its arithmetic in `dtype`.

    `changed`: fields of its configuration; `mend` is given the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = AutoConfig.from_pretrained(path)
    for name, value in (changed or {}).items():
        setattr(config, name, value)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, output_loading_info=True, **eager
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    if mend is not None:
        mend(model)
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)[None], **inputs).logits[0].double().log_softmax(-1)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The checkpoints by name. `gva` differs from `hybrid` in every dimension the code could mix up."""
    root = tmp_path_factory.mktemp("oracle-models")
    wide = dict(heads=2, kv_heads=1, head_dim=32, linear_head_dim=128, linear_key_heads=1, tie=False)
    return {
        "hybrid": save_hybrid_model(root / "hybrid"),
        "gva": save_hybrid_model(
            root / "gva", hidden=96, linear_value_heads=3, full_attention_interval=3, **wide
        ),
        "attention": save_attention_model(root / "attention"),
        "one-linear": save_hybrid_model(root / "one-linear", layer_types=["linear_attention"]),
        "one-gated-attention": save_hybrid_model(
            root / "one-gated-attention", layer_types=["full_attention"]
        ),
        "one-attention": save_attention_model(root / "one-attention", layers=1),
        "demo": DEMO,
    }


@pytest.fixture(scope="module")
def oracle(models):
    """Oracles by model name, made once: they keep their records."""
    return cache(lambda name: Oracle(models[name]))


def split(prompt: list[list[int]]) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """A prompt as (leading, segments, query, all tokens in order)."""
    leading, *segments, query = prompt
    return leading, segments, query, [token for part in prompt for token in part]


# ---- transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "hybrid", "gva", "attention"])
def test_full_recompute_agrees_with_transformers(name, models, oracle):
    expected = transformers_logprobs(models[name], TOKENS)
    got = oracle(name).full_logprobs(TOKENS, all_rows=True)
    assert distance(got[-1], expected[-1]) < 1e-4
    # Over all rows, relative to the size of the logits (43 on the demo model), whose fp32 rounding this is.
    assert distance(got, expected) < 1e-5 * expected.abs().max()


def test_attention_model_agrees_with_transformers_under_a_mask(models, oracle):
    """PIC of a pure attention model is one masked forward: isolated copies of the segments, then the stream.

    RoPE is relative, so a copy run at its logical positions has the values of its run at position 0.
    """
    head, tail = 5, 3
    tokens, positions, owner, public = [], [], [], []
    start = 0
    for i, segment in enumerate([LEADING, *SEGMENTS]):
        n = len(segment)
        tokens += segment
        positions += range(start, start + n)
        owner += [i] * n
        public += [i == 0 or head <= j < n - tail for j in range(n)]
        start += n
    copies = len(tokens)
    sees = [[owner[c] == owner[r] and c <= r for c in range(copies)] for r in range(copies)]
    start = len(LEADING)
    for i, segment in enumerate([*SEGMENTS, QUERY], start=1):
        for j, token in enumerate(segment):
            is_query, in_tail = i > len(SEGMENTS), j >= len(segment) - tail
            if is_query or j < head or in_tail:
                last = i if in_tail else i - 1
                row = [public[c] and owner[c] <= last for c in range(copies)]
                tokens.append(token)
                positions.append(start + j)
                sees.append(row + [True] * (len(tokens) - copies))
        start += len(segment)
    mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min)
    for r, row in enumerate(sees):
        mask[r, : len(row)][torch.tensor(row)] = 0
    masked = transformers_logprobs(
        models["attention"],
        tokens,
        attention_mask=mask[None, None],
        position_ids=torch.tensor(positions)[None],
    )
    got = oracle("attention").next_token_logprobs(LEADING, SEGMENTS, QUERY, head=head, tail=tail)
    assert distance(got, masked[-1]) < 1e-4


# ---- prompts for which PIC is exact ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "hybrid", "gva", "attention"])
@pytest.mark.parametrize("length", [2, 60])
def test_leading_segment_and_query_equal_full_recompute(name, length, oracle):
    leading, query = PROMPTS[0][3][:length], PROMPTS[0][4]
    got = oracle(name).next_token_logprobs(leading, [], query)
    assert distance(got, oracle(name).full_logprobs(leading + query)) < EXACT


@pytest.mark.parametrize("name", ["demo", "hybrid", "gva", "attention"])
@pytest.mark.parametrize("leading_in_stream", [False, True])
def test_everything_in_the_stream_equals_full_recompute(name, leading_in_stream, oracle):
    leading, segments, query, tokens = split(PROMPTS[1])
    got = oracle(name).next_token_logprobs(
        leading, segments, query, in_stream=range(len(segments)), leading_in_stream=leading_in_stream
    )
    assert distance(got, oracle(name).full_logprobs(tokens)) < EXACT


@pytest.mark.parametrize(
    ("name", "head", "tail"),
    [
        # A first layer's K and V depend on their token alone, so nothing is approximated whatever the window.
        ("one-attention", 0, 0),
        ("one-gated-attention", 0, 0),
        ("one-gated-attention", 8, 8),
        # A first linear layer also looks k-1 = 3 rows back, which the head covers.
        ("one-linear", 3, 0),
        ("one-linear", 8, 8),
    ],
)
def test_one_layer_is_exact_and_its_faults_are_not(name, head, tail, oracle):
    leading, segments, query, tokens = split(PROMPTS[2])
    full = oracle(name).full_logprobs(tokens)
    ask = {"head": head, "tail": tail}
    assert distance(oracle(name).next_token_logprobs(leading, segments, query, **ask), full) < EXACT
    blind = {"early_visibility"}  # spoils seam tokens' outputs only, which end with this layer
    if name != "one-linear" or not tail:
        blind.add("compose_late")  # the same for attention; and before or after an empty tail is one place
    for fault in set(oracle(name).faults()) - blind:
        got = oracle(name).next_token_logprobs(leading, segments, query, fault=fault, **ask)
        assert distance(got, full) > 1e-4, fault


@pytest.mark.parametrize("name", ["hybrid", "gva", "demo"])
@pytest.mark.parametrize(("head", "tail"), [(3, 0), (4, 4), (8, 8)])
def test_composed_state_of_the_first_layer_equals_one_scan(name, head, tail, oracle):
    full = oracle(name).full_state(TOKENS)[0]

    def error(**options) -> float:
        got = oracle(name).state_after(LEADING, SEGMENTS, QUERY, head=head, tail=tail, **options)[0]
        assert distance(got.conv, full.conv) < 1e-12
        return ((got.S - full.S).norm() / full.S.norm()).item()

    assert error() < 1e-12
    assert error(compose_T=False) > 0.1
    assert error(fault="seam_off_by_one") > 1e-6


def test_too_small_a_head_is_not_exact(oracle):
    """With head < k-1 the interior's first rows are convolved with nothing before them: it shows."""
    full = oracle("hybrid").full_state(TOKENS)[0].S
    got = oracle("hybrid").state_after(LEADING, SEGMENTS, QUERY, head=2, tail=0)[0].S
    assert distance(got, full) > 1e-6


def test_leading_record_is_the_state_after_it(oracle):
    leading = PROMPTS[0][3]
    for record, state in zip(
        oracle("hybrid").record(leading, leading=True), oracle("hybrid").full_state(leading), strict=True
    ):
        if state is not None:
            assert distance(record.S, state.S) < 1e-12
            assert torch.equal(record.conv, state.conv)
            norms = torch.linalg.matrix_norm(record.T, 2)
            assert norms.max() <= 1 + 1e-9 and norms.max() > 1e-2, "T must be alive"


# ---- layout and options ------------------------------------------------------------------------------------


def test_stream_layout():
    a, b, c = list(range(100, 110)), list(range(200, 204)), list(range(300, 308))
    stream = build_stream([1, 2, 3], [a, b, c], [7, 8], head=2, tail=3, generated=[9], in_stream={2})
    assert stream.tokens == (100, 101, 107, 108, 109, *b, *c, 7, 8, 9)
    assert stream.positions == (3, 4, 10, 11, 12, 13, 14, 15, 16, *range(17, 25), 25, 26, 27)
    assert stream.composes == (
        Compose(0, (1, 2, 3), 0, 0, 3, (Shown(0, 0, 3),)),
        Compose(2, tuple(a), 3, 2, 7, (Shown(2, 2, 7),)),
    )


@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_generated_tokens_continue_the_query(name, oracle):
    ask = oracle(name).next_token_logprobs
    got = ask(LEADING, SEGMENTS, QUERY[:4], generated=QUERY[4:])
    assert distance(got, ask(LEADING, SEGMENTS, QUERY)) < EXACT


def test_options_change_what_they_should(oracle):
    ask = oracle("hybrid").next_token_logprobs
    reference = ask(LEADING, SEGMENTS, QUERY)
    assert torch.equal(ask(LEADING, SEGMENTS, QUERY), reference), "records are reused, not changed"
    assert torch.equal(
        ask(LEADING, SEGMENTS, QUERY, compose_T=False), ask(LEADING, SEGMENTS, QUERY, fault="no_T")
    )
    for other in (
        ask(LEADING, SEGMENTS, QUERY, head=4, tail=4),
        ask(LEADING, SEGMENTS, QUERY, head=0, tail=0),
        ask(LEADING, SEGMENTS, QUERY, in_stream={1}),
        ask(LEADING, SEGMENTS[::-1], QUERY),
        ask([], [*SEGMENTS, LEADING], QUERY),
    ):
        assert distance(other, reference) > 1e-3
    # The leading segment is shorter than two seams: as an interior one it is computed in the stream.
    assert distance(ask([], [LEADING, *SEGMENTS], QUERY), reference) < EXACT


def test_short_interior_completes_its_conv_tail_from_the_rows_before_it(oracle):
    segment = PROMPTS[0][1][:10]
    whole = oracle("hybrid").record(segment, head=0, tail=0)[0].conv
    assert torch.equal(oracle("hybrid").record(segment, head=9, tail=0)[0].conv, whole)
    one = oracle("hybrid").record(segment[:1], head=0, tail=0)[0].conv
    assert not one[:2].any() and one[2].any()


def test_mistakes_are_refused(oracle):
    with pytest.raises(ValueError, match="unknown fault"):
        oracle("hybrid").next_token_logprobs([], [], [5], fault="no_such_fault")
    with pytest.raises(ValueError, match="empty"):
        oracle("hybrid").next_token_logprobs(LEADING, [], [])


# ---- faults ------------------------------------------------------------------------------------------------


def fault_effects(path: Path, oracle: Oracle) -> dict[str, tuple[float, float]]:
    """Mean (largest log-probability difference, KL) over the prompts of every fault and of bf16 `noise`.

    Noise is what transformers' own model loses in bf16 on the same prompts: the tolerance an engine needs.
    """
    rows: dict[str, list[tuple[float, float]]] = {"noise": []}
    for prompt in PROMPTS:
        leading, segments, query, tokens = split(prompt)
        full = oracle.full_logprobs(tokens)
        rounded = transformers_logprobs(path, tokens, torch.bfloat16)[-1]
        rows["noise"].append((distance(full, rounded), divergence(full, rounded)))
        reference = oracle.next_token_logprobs(leading, segments, query)
        for fault in oracle.faults():
            got = oracle.next_token_logprobs(leading, segments, query, fault=fault)
            rows.setdefault(fault, []).append((distance(reference, got), divergence(reference, got)))
    effects = {name: tuple(torch.tensor(pairs).mean(0).tolist()) for name, pairs in rows.items()}
    for name, (largest, kl) in effects.items():
        print(f"{name:22s} max |dlogp| {largest:8.4f}   KL {kl:.1e}")
    return effects


@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_every_fault_stands_out_from_bf16_noise(name, models, oracle):
    effects = fault_effects(models[name], oracle(name))
    noise, noise_kl = effects.pop("noise")
    assert set(effects) == set(oracle(name).faults())
    for fault, (largest, kl) in effects.items():
        assert largest > 2 * noise and kl > 4 * noise_kl, (fault, largest, kl, noise, noise_kl)


def test_state_faults_stand_out_on_the_demo_model(models, oracle):
    """The demo model answers from its recurrent state: a wrong T shows, wrong K and V hardly do."""
    effects = fault_effects(models["demo"], oracle("demo"))
    noise, noise_kl = effects["noise"]
    for fault in ("no_T", "forget_left", "T_transposed", "state_over_head"):
        assert effects[fault][0] > 3 * noise and effects[fault][1] > 3 * noise_kl, fault


def test_fault_names_are_one_set(oracle):
    assert set(oracle("hybrid").faults()) == set(FAULTS)
    assert not set(oracle("attention").faults()) & set(STATE_FAULTS)
    assert not set(oracle("one-linear").faults()) & set(ATTENTION_FAULTS)
