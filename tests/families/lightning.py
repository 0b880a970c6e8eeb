"""What is to be shown of lightning attention alone: its keys are rotated inside the layer, so a record's
state has to be moved to where it is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.linear_attn import BailingLinearAttentionMetadata

from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import RetentionRecords

from .contract import Served

AT = {"float32": 2e-6, "bfloat16": 0.02}
"""Relative errors, measured: below 4e-7; in bfloat16 those of vLLM's cache and of the output."""


def errors_at(llm: Any, position: int) -> dict[str, float]:
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


def records_at_any_position(served: Served) -> None:
    """The first layer's records, read where they were made, further on and far away."""
    dtype = served.case.dtype
    served.engine.reset()
    for position in (0, 1_000, 100_000):
        found = served.engine.call(errors_at, position)
        assert max(found["state"], found["output"]) <= AT[dtype], (position, found)
        if position:
            assert found["not moved"] > 0.1, (position, found)
        if position == 100_000 and dtype == "float32":
            assert found["by vLLM's table"] > 50 * AT[dtype], found
    served.engine.reset()
