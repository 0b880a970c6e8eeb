"""What is to be shown of Mamba's layers, lightning attention, short convolutions, latent attention, windows,
and layers that share K and V, each alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine.conftest import CONTEXT
from engine.engines import Ask, EngineError, worker_of
from engine.test_contexts_and_islands import ISLANDS, forget_streams, islands_of
from engine.test_oracle_agreement import KL_FACTOR, distance
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata

from vllm_hypic.backends.attention.latents import LatentRows
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import RetentionRecords

from .contract import BEHIND_A_TAIL, COMPOSED, ONE_TOKEN, QUERY, TEXT, THIRD, Served, first_token, largest

# -- Mamba -----------------------------------------------------------------------------------------------


def forget(llm: Any, *parts: str) -> int:
    """Zeroes a part of all records, the first of these that they have; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        next(getattr(records, part) for part in parts if hasattr(records, part)).zero_()
    return len(pool.linear)


def transitions_are_the_records(served: Served) -> None:
    """Without those of the records an answer is that of a request that says `naive`."""
    served.engine.reset()
    right = first_token(served.engine, COMPOSED)
    # Mamba1 keeps the time that a segment takes, Mamba2 a number a head.
    assert served.engine.call(forget, "elapsed", "log_transition")
    served.engine.call(forget_streams)
    forgotten = first_token(served.engine, COMPOSED)
    naive = first_token(served.engine, replace(COMPOSED, extra={"hypic_link": "naive"}))
    served.engine.reset()
    assert torch.equal(forgotten, naive), "transitions come from elsewhere than the records"
    assert not torch.equal(forgotten, right)


def rows_apart(llm: Any) -> list[bool]:
    """Stock code over a batch of two decodes and three prefills, one of which goes on, and over two
    sub-batches of it: whether outputs and both states have the same bits."""
    from vllm_hypic.backends.linear.layout import StockRows
    from vllm_hypic.backends.linear.mamba2.cpu import HypicCPUMamba2, ProjectedRows

    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    layer = next(found for found in layers if isinstance(found, HypicCPUMamba2))
    starts, computed = [0, 1, 2, 72, 77, 107], [130, 7, 0, 64, 0]
    width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    rng = torch.Generator().manual_seed(0)
    dtype = layer.conv_weights.dtype
    x = ProjectedRows(torch.randn(starts[-1], width, generator=rng).to(dtype))
    before = [torch.randn(state[1:6].shape, generator=rng).to(state.dtype) for state in layer.kv_cache]

    class Whole:
        state_indices_tensor_d = torch.tensor([[1], [2]], dtype=torch.int32)
        state_indices_tensor_p = torch.tensor([3, 4, 5], dtype=torch.int32)
        seq_lens, chunk_size = torch.full((5,), 200), 128

    def run(requests: list[int]) -> list[torch.Tensor]:
        for state, values in zip(layer.kv_cache, before, strict=True):
            state[1:6] = values
        spans = [torch.arange(starts[i], starts[i + 1]) for i in requests]
        ends = torch.tensor([0, *map(len, spans)]).cumsum(0).tolist()
        rows = StockRows(
            sum(i < 2 for i in requests), torch.cat(spans), ends, requests, [computed[i] for i in requests]
        )
        out = torch.zeros(ends[-1], layer.tped_intermediate_size, dtype=dtype)
        metadata = layer.sub_batch(NotImplemented, Whole, rows)
        with set_forward_context({layer.prefix: metadata}, config), torch.inference_mode():
            layer.run_stock(x.part(rows.tokens), out)
        slots = torch.tensor(requests) + 1
        return [*out.split([len(s) for s in spans]), *(state[slots] for state in layer.kv_cache)]

    *whole, conv, ssm = run([*range(5)])
    found = []
    for requests in ([0, 3], [1, 2, 4]):
        *apart, its_conv, its_ssm = run(requests)
        found += [torch.equal(whole[i], y) for i, y in zip(requests, apart, strict=True)]
        found += [torch.equal(conv[requests], its_conv), torch.equal(ssm[requests], its_ssm)]
    return found


def rows_apart_have_stock_bits(served: Served) -> None:
    served.engine.reset()
    assert served.engine.call(rows_apart) == [True] * 9


# -- lightning attention: keys are rotated inside the layer, so a state is moved to where it is read -----

STATE_BOUNDS = {"float32": 2e-6, "bfloat16": 0.02}
"""Relative errors, measured: below 4e-7; in bfloat16 those of vLLM's cache and of the output."""


def state_errors_at(llm: Any, position: int) -> dict[str, float]:
    """A record of 300 tokens is captured alone and read by one row behind it: how far state and output are,
    relative to the largest number, from those of the same tokens computed at ``position``; also were the
    state not moved, and were the tokens rotated by vLLM's own table."""
    config = llm.llm_engine.vllm_config
    layer = config.compilation_config.static_forward_context["model.layers.0.self_attn"]
    runtime, rope, tokens, cpu = layer.hypic_runtime, layer.rotary_emb, 300, torch.device("cpu")
    assert rope.cos_sin_cache is rope.hypic_rotations, "attention rounds a table of its own"
    records = runtime.pool.records(layer.prefix, RetentionRecords)
    rng = torch.Generator().manual_seed(position)
    hidden = torch.randn(tokens + 1, layer.hidden_size, generator=rng).to(layer.dense.weight.dtype)

    def run(first: int, stop: int, at: int, step: StepContext | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[first, stop)`` as a request's first, from position ``at`` on: state and last output."""
        n = stop - first
        ends, slot = torch.tensor([0, n], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        metadata = BailingLinearAttentionMetadata(1, n, 0, 0, ends, ends[1:], slot)
        out, runtime.step = torch.zeros_like(hidden[:n]), step
        with set_forward_context({layer.prefix: metadata}, config), torch.inference_mode():
            layer._forward(hidden[first:stop], out, torch.arange(at, at + n))
        runtime.step = None
        return layer.kv_cache[0][1].to(torch.float32, copy=True), out[-1].float()

    plan = CapturePlan(0, tokens, 0, np.arange(tokens), None, leading=False)
    row = BatchRow(0, 0, tokens, 0, tokens)
    run(0, tokens, 0, StepContext([], [capture_row("r", row, plan)], cpu, Batch([0, tokens], [0])))
    layer.forget("r")

    def composed(shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = ComposePoint(0, 0, 0, replace_state=False, shift=shift)
        stream = StreamPlan.alone(np.array([position + tokens]))
        read = composed_row(BatchRow(0, 0, 1, 0, 1), StreamTensors.of(replace(stream, points=(point,)), cpu))
        return run(tokens, tokens + 1, position + tokens, StepContext([read], [], cpu, Batch([0, 1], [0])))

    wanted, moved, left = run(0, tokens + 1, position, None), composed(position), composed(0)
    table, rope.cos_sin_cache = rope.cos_sin_cache, rope._compute_cos_sin_cache()
    theirs = run(0, tokens + 1, position, None)
    rope.cos_sin_cache = table
    records.state[0].zero_()
    pairs = {"state": (wanted[0], moved[0]), "output": (wanted[1], moved[1])}
    pairs |= {"not moved": (wanted[0], left[0]), "by vLLM's table": (theirs[0], moved[0])}
    return {name: float((a - b).abs().max() / a.abs().max()) for name, (a, b) in pairs.items()}


def states_at_any_position(served: Served) -> None:
    """The first layer's records, read where they were made, further on and far away."""
    dtype = served.case.dtype
    served.engine.reset()
    for position in (0, 1_000, 100_000):
        found = served.engine.call(state_errors_at, position)
        assert max(found["state"], found["output"]) <= STATE_BOUNDS[dtype], (position, found)
        if position:
            assert found["not moved"] > 0.1, (position, found)
        if position == 100_000 and dtype == "float32":
            assert found["by vLLM's table"] > 50 * STATE_BOUNDS[dtype], found
    served.engine.reset()


# -- short convolutions: a segment overwrites the state, so a record is its last inputs ------------------


def tails_are_the_records(served: Served) -> None:
    served.engine.reset()
    theirs = served.oracle.next_token_logprobs(*ONE_TOKEN.parts, head=8, tail=0)
    assert largest(first_token(served.engine, BEHIND_A_TAIL), theirs) <= served.bound
    (warm,) = served.engine.ask(BEHIND_A_TAIL)
    assert warm.cached > 500
    assert served.engine.call(forget, "conv_tail") == 3
    found = largest(first_token(served.engine, BEHIND_A_TAIL), theirs)
    served.engine.reset()
    assert found > 5 * served.bound, f"a forgotten tail goes unseen: {found:.1e}"


def naive_is_refused(served: Served) -> None:
    """It leaves a transition out, and there is none."""
    with pytest.raises(EngineError, match="'naive' leaves out the transition"):
        served.engine.ask(replace(COMPOSED, extra={"hypic_link": "naive"}))


# -- latent attention: records hold latents, and a key that is rotated when read -------------------------

ONE_MLA_LAYER: dict[str, Any] = {
    **{"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    **{"num_key_value_heads": 4, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 64},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"n_group": 2, "topk_method": "noaux_tc", "topk_group": 1},
}
"""One layer, whose experts are chosen in groups by sigmoids."""
MISROTATED = ("rotated_twice", "not_rotated")


def latent_errors_at(llm: Any, position: int) -> dict[str | None, float]:
    """A record of 40 tokens is captured and read by 9 rows behind it, the first at ``position + 40``: the
    largest error of the first layer's output, of size 1, against heads projected up in float64; and, by name,
    how far faults of :data:`MISROTATED` in the reading are from it."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    layer = layers["model.layers.0.self_attn.attn"]
    impl, link, rng = layer.impl, layer.impl.link, torch.Generator().manual_seed(position)
    columns, rows, heads, rope = 40, 9, impl.num_heads, impl.qk_rope_head_dim
    slots, own = np.arange(7, 7 + columns), np.arange(position + columns, position + columns + rows)

    def rotated(x: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        """By the engine's table, whose angles are rounded to float32, in ``x``'s dtype."""
        cos, sin = (part[:, None].to(x) for part in link.table()[torch.from_numpy(at)].chunk(2, -1))
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    latent = torch.randn(columns + rows, impl.kv_lora_rank, generator=rng)
    key = torch.randn(columns + rows, 1, rope, generator=rng)
    query = torch.randn(rows, heads, impl.qk_nope_head_dim + rope, generator=rng)
    cache = torch.zeros_like(layer.kv_cache[:2])
    plan = CapturePlan(0, columns, 0, slots, None, leading=False)
    captured = capture_row("r", BatchRow(0, 0, columns, 0, columns), plan)
    link.runtime.step = StepContext([], [captured], torch.device("cpu"))
    nowhere = torch.full((columns,), -1)
    impl.do_kv_cache_update(
        latent[:columns], rotated(key[:columns], np.arange(columns)), cache, nowhere, "auto", None
    )
    link.runtime.step = None
    rotated_own = rotated(key[columns:], own)
    impl.do_kv_cache_update(latent[columns:], rotated_own, cache, torch.arange(rows), "auto", None)
    point = ComposePoint(0, 0, columns, replace_state=True)
    stream = StreamPlan(own, int(own[-1]) + 1, (point,), slots, np.arange(position, position + columns), True)
    composed = composed_row(BatchRow(0, 0, rows, 0, rows), StreamTensors.of(stream, torch.device("cpu")))
    here = LatentRows.of([composed], 0, 0)
    nope, pe = query.split([impl.qk_nope_head_dim, rope], -1)
    given = impl.absorbed(layer, nope), rotated(pe, own)
    table = torch.zeros(1, 1, dtype=torch.int32)
    ours = torch.empty(rows, heads * impl.v_head_dim)
    layer._v_up_proj(impl.latent(link, here.public, *given, cache, table), out=ours)

    def wanted(fault: str | None = None) -> torch.Tensor:
        public, at = key[:columns].double(), np.arange(position, position + columns)
        public = rotated(public, np.arange(columns)) if fault == "rotated_twice" else public
        public = public if fault == "not_rotated" else rotated(public, at)
        keys = [public, rotated(key[columns:].double(), own)]
        up = torch.einsum("tr,hpr->thp", latent.double(), layer.W_UK_T.double())
        k = torch.cat([up, torch.cat(keys).expand(-1, heads, -1)], -1)
        v = torch.einsum("tr,hrv->thv", latent.double(), layer.W_UV.double())
        q = torch.cat([nope.double(), rotated(pe.double(), own)], -1)
        seen = torch.arange(columns + rows) <= columns + torch.arange(rows)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q, k) * impl.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khv->qhv", weights, v).flatten(1)

    return {fault: float((ours - wanted(fault)).abs().max()) for fault in (None, *MISROTATED)}


def latents_at_any_position(served: Served) -> None:
    """In float32: caches in bfloat16 round what is compared."""
    if served.case.dtype != "float32":
        return
    served.engine.reset()
    for position in (0, 1_000, 100_000):
        found = served.engine.call(latent_errors_at, position)
        assert found.pop(None) <= 1e-5, (position, found)
        assert min(found[fault] for fault in MISROTATED) > (0.1 if position else -1), (position, found)
    served.engine.reset()


def longer_questions_go_on(served: Served) -> None:
    """Where the CPU has AMX vLLM's other backend runs in bfloat16, which prefills in chunks and behind its
    prefix cache."""
    first_token(served.engine, Ask(TEXT.tokens))
    text = replace(TEXT, query=[*QUERY, *THIRD])
    theirs = served.oracle.next_token_logprobs(*text.parts)
    assert largest(first_token(served.engine, Ask(text.tokens)), theirs) <= 2 * served.bound


# -- windows, and layers that share K and V --------------------------------------------------------------


def islands_behind_a_text(served: Served) -> None:
    """Records with a context, and recomputed windows inside them."""
    extra = {"hypic_context": "text", "hypic_islands": ISLANDS}
    ours, theirs = [], []
    for text in (text.asking() for text in served.texts):
        islands = served.engine.call(islands_of, text.tokens, extra)
        assert any(islands.values())
        ours.append(first_token(served.engine, Ask(text.tokens, extra=extra)))
        theirs.append(served.oracle.next_token_logprobs(*text.parts, context=CONTEXT, islands=islands))
    assert served.weighed(distance(ours, theirs)) <= served.bound


def a_window_is_what_stock_says(served: Served) -> None:
    """Ordinary requests against windows one token longer or shorter: off by one would be seen."""
    ours = [first_token(served.engine, Ask(tuple(text.whole))) for text in served.texts]
    exact, noise = served.oracle.config["sliding_window"], served.ordinary()
    for window in (exact - 1, exact + 1):
        served.oracle.config["sliding_window"] = window
        try:
            found = distance(ours, [served.oracle.full_logprobs(text.whole) for text in served.texts])
        finally:
            served.oracle.config["sliding_window"] = exact
        assert found.kl > 4 * KL_FACTOR * noise.kl


def owners(llm: Any) -> tuple[list[str], int, int]:
    """Layers that records hold K and V of, and bytes of a token: in them, and as the pool counts them."""
    geometry = worker_of(llm).geometry
    each = sum(2 * a.kv_heads * a.head_size * a.dtype.itemsize for a in geometry.attention)
    return [a.layer for a in geometry.attention], each, geometry.page_bytes // geometry.page_tokens


def records_hold_what_layers_own(served: Served) -> None:
    """The last two of five layers read what others have."""
    layers, each, counted = served.engine.call(owners)
    assert [layer.split(".")[2] for layer in layers] == ["0", "1", "2"] and each == counted
