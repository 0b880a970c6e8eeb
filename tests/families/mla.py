"""What is to be shown of latent attention alone: records hold latents, and a key that is rotated when
read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engine.engines import Ask

from vllm_hypic.backends.attention.latents import LatentRows
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import BatchRow, StepContext, StreamTensors, capture_row, composed_row

from .contract import QUERY, TEXT, THIRD, Served, first_token, largest

SMALL: dict[str, Any] = {
    **{"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    **{"num_key_value_heads": 4, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 64},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"n_group": 2, "topk_method": "noaux_tc", "topk_group": 1},
}
"""One layer, whose experts are chosen in groups by sigmoids."""
PLANTED = ("rotated_twice", "not_rotated")


def errors_at(llm: Any, position: int) -> dict[str | None, float]:
    """A record of 40 tokens is captured and read by 9 rows behind it, the first at ``position + 40``: the
    largest error of the first layer's output, of size 1, against heads projected up in float64; and, by name,
    how far faults of :data:`PLANTED` in the reading are from it."""
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

    return {fault: float((ours - wanted(fault)).abs().max()) for fault in (None, *PLANTED)}


def records_at_any_position(served: Served) -> None:
    """In float32: caches in bfloat16 round what is compared."""
    if served.case.dtype != "float32":
        return
    served.engine.reset()
    for position in (0, 1_000, 100_000):
        found = served.engine.call(errors_at, position)
        assert found.pop(None) <= 1e-5, (position, found)
        assert min(found[fault] for fault in PLANTED) > (0.1 if position else -1), (position, found)
    served.engine.reset()


def longer_questions_go_on(served: Served) -> None:
    """Where the CPU has AMX vLLM's other backend runs in bfloat16, which prefills in chunks and behind its
    prefix cache."""
    first_token(served.engine, Ask(TEXT.tokens))
    text = replace(TEXT, query=[*QUERY, *THIRD])
    theirs = served.oracle.next_token_logprobs(*text.parts)
    assert largest(first_token(served.engine, Ask(text.tokens)), theirs) <= 2 * served.bound
