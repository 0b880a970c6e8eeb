"""What driven passes do on a GPU, and how much of its memory they take: see ``device_rules.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attention_world as attention
import delta_world
import numpy as np
import pytest
import torch
from delta_world import BAILING, KIMI, QWEN
from device_rules import OURS, Device, device
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.v1.attention.backends import flash_attn

from vllm_hypic.backends.attention import cuda as attention_layer
from vllm_hypic.backends.attention import cuda_rows
from vllm_hypic.backends.linear.gdn import cuda as delta_layer
from vllm_hypic.backends.ops.span_attention import plan as span_plan
from vllm_hypic.patches import cuda_kept_lse
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.step import BatchRow, capture_row
from vllm_hypic.pool.transition_blocks import TransitionBlocks

Patch = pytest.MonkeyPatch
STOCK = (
    (QwenGatedDeltaNetAttention, "_forward_core"),
    (KimiGatedDeltaNetAttention, "_forward"),
    (BailingMoeV3KimiDeltaAttention, "_forward"),
)


@pytest.fixture(autouse=True)
def _stock(monkeypatch: Patch) -> None:
    """Stock code is the worlds' stand-ins."""
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "_forward_core", delta_world.stock_core)
    monkeypatch.setattr(KimiGatedDeltaNetAttention, "_forward", delta_world.kimi_stock)
    monkeypatch.setattr(BailingMoeV3KimiDeltaAttention, "_forward", delta_world.bailing_stock)
    monkeypatch.setattr(pool_module, "TransitionBlocks", partial(TransitionBlocks, joint=True))
    kernel = flash_attn.FA4DenseAttentionKernel
    monkeypatch.setattr(kernel, "__call__", kernel.__call__)
    cuda_kept_lse.apply()
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attention.stand_in, raising=False)


class Attention:
    """A layer of wide heads in a pass whose requests that decode have many rows; partial results,
    a part of 4 columns, are those of 16 rows at a time."""

    def __init__(self, patch: Patch, **kind: Any) -> None:
        patch.setattr(attention, "HEADS", 8)
        patch.setattr(attention, "SIZE", 128)
        patch.setattr(cuda_rows, "SHORTEST", 4)
        patch.setattr(span_plan, "part_columns", lambda *_: 4)
        for module in (cuda_rows, attention_layer):
            patch.setattr(module, "PARTIAL_BYTES", 16 * 3 * 8 * 128 * 4)
        self.patch = patch
        self.world = attention.World(torch.bfloat16, attention.angles(128), drafts=23, **kind)

    def run(self) -> Device:
        world = self.world
        with device(self.patch) as here, self.patch.context() as patch:
            stand_in = here.stock(flash_attn.flash_attn_varlen_func)

            def counted(*args: Any, **kwargs: Any) -> Any:
                result = stand_in(*args, **kwargs)
                # Of the stock call the log-sum-exp alone stays.
                here.count(result if kwargs.get("out") is None else result[1:])
                return result

            here.own(vars(world.pool.kv["layer"]), world.query, world.key, world.value, world.cache)
            here.own(world.table, world.impl.sinks, vars(world.metadata))
            here.own(*[vars(composed.stream) for composed in world.step.composed])
            patch.setattr(flash_attn, "flash_attn_varlen_func", counted)
            world.forward()
        assert world.runtime.calls["span_attention"] == 1
        return here

    def bound(self) -> int:
        return self.world.impl.scratch_bytes(self.world.starts[-1], self.world.dtype)


class Delta:
    """A gated delta net in a pass of two segment requests, a composed one and two that decode."""

    def __init__(self, patch: Patch, kind: delta_world.Kind, at_once: int) -> None:
        size = 64
        patch.setattr(delta_world, "K", size)
        kind = replace(kind, V=size, gates=(*kind.gates[:1], *[size for _ in kind.gates[1:]]))
        world = self.world = delta_world.World(kind, (*delta_world.ALL[:3], (2, 32), (0, 32)))
        rows = [BatchRow(i, world.starts[i], world.starts[i + 1], s0, s0 + 32) for i, s0 in ((3, 2), (4, 0))]
        world.step = replace(
            world.step,
            captures=[
                capture_row(
                    f"segment {slot}", row, CapturePlan(row.s0, row.s1, slot, np.arange(32), None, False)
                )
                for slot, row in zip((2, 3), rows, strict=True)
            ],
        )
        world.layer.conv_dim = kind.channels
        world.pool.transition_blocks.release([3])
        patch.setattr(delta_layer, "SUMMARY_BYTES", at_once * world.layer._summary_bytes())
        self.patch = patch

    def run(self) -> Device:
        world, records = self.world, self.world.pool.linear[delta_world.NAME]
        with device(self.patch) as here, self.patch.context() as patch:
            here.own([getattr(records, name) for name in ("state", "conv_tail", "transitions", "block_of")])
            here.own(list(world.layer.parameters()), world.layer.kv_cache, world.mixed, world.a, world.b)
            here.own([t for name, t in vars(world.metadata).items() if not name.endswith("_cpu")])
            for layer, name in STOCK:
                patch.setattr(layer, name, here.stock(getattr(layer, name)))
            kind = type(world.kind)

            def call(*given: Any, stock: Callable[..., None] = kind.call) -> None:
                here.own(given[-1])
                stock(*given)

            patch.setattr(kind, "call", call)
            world.run(world.step)
        assert world.runtime.calls == {"capture_linear": 1, "compose": 1}
        return here

    def bound(self) -> int:
        """Without what interiors carry between passes: here none is cut."""
        return self.world.layer.scratch(self.world.tokens, torch.float32).working


QUANTISED = {"scales": attention.SCALES, "window": 20, "sinks": True}
"""What takes most: the query is copied, private and public parts are both of ours."""
KINDS = pytest.mark.parametrize(
    "kind", [{}, {"sinks": True}, QUANTISED], ids=["", "sinks", "FP8 windows sinks"]
)


@KINDS
def test_attention(kind: dict[str, Any], monkeypatch: Patch) -> None:
    layer = Attention(monkeypatch, **kind)
    here = layer.run()
    assert not here.broken
    assert here.peak <= layer.bound()
    if kind is QUANTISED:
        elements = layer.world.starts[-1] * 8 * 128
        result, copies = 4 * elements, 3 * 2 * elements
        assert here.peak > layer.bound() - min(result, copies), "books without one of these would pass"


def test_attention_in_one_piece_would_show(monkeypatch: Patch) -> None:
    layer = Attention(monkeypatch, **QUANTISED)
    monkeypatch.setattr(cuda_rows, "PARTIAL_BYTES", 512 << 20)
    assert layer.run().peak > layer.bound()


@pytest.mark.parametrize("kind", [QWEN, KIMI, BAILING], ids=["Qwen", "Kimi", "Bailing V3"])
def test_delta_nets(kind: delta_world.Kind, monkeypatch: Patch) -> None:
    layer = Delta(monkeypatch, kind, at_once=2)
    here = layer.run()
    assert not here.broken
    assert here.peak <= layer.bound()
    assert here.peak > layer.bound() - layer.world.layer._summary_bytes(), "books without one would pass"


@pytest.mark.parametrize("kept", [True, False])
def test_summaries_of_few_interiors_are_held_at_once(kept: bool, monkeypatch: Patch) -> None:
    layer = Delta(monkeypatch, QWEN, at_once=1)
    bound = layer.bound()
    if not kept:
        monkeypatch.setattr(type(layer.world.layer), "_segments_at_once", lambda self: 2)
    assert (layer.run().peak <= bound) is kept


FAULTS = {
    "query[0, 0, 0].item()": "a number is read",
    "bool(query[0, 0, 0] > 0)": "a number is read",
    "query[0].tolist()": "tolist()",
    "query.cpu()": "cpu()",
    "query.float().numpy()": "numpy()",
    "query.nonzero()": "nonzero",
    "query[:, 0, 0][query[:, 0, 0] > 0]": "a mask",
    "query.new_zeros(2).copy_(torch.tensor([1, 2]))": "copy_",
    "query.index_select(0, torch.tensor([1]))": "index_select",
    "torch.tensor([1, 2], device=query.device)": "torch.tensor(",
}


def test_what_is_against_the_rules_shows(monkeypatch: Patch) -> None:
    """Planted in the forward pass, in a file of the package."""
    layer = Attention(monkeypatch)
    planted = [compile(fault, f"{OURS}planted_{i}.py", "eval") for i, fault in enumerate(FAULTS)]
    heads = attention_layer.HypicCUDAAttentionImpl.heads

    def faulty(impl: Any, query: Tensor) -> Any:
        for fault in planted:
            eval(fault, {"torch": torch, "query": query})
        return heads(impl, query)

    monkeypatch.setattr(attention_layer.HypicCUDAAttentionImpl, "heads", faulty)
    found = layer.run().broken
    for i, what in enumerate(FAULTS.values()):
        mine = [line for line in found if line.startswith(f"planted_{i}.py")]
        assert any(what in line for line in mine), (what, mine)
    assert not [line for line in found if not line.startswith("planted_")]


def test_a_kernel_that_is_given_what_lies_on_the_host_shows(monkeypatch: Patch) -> None:
    layer = Attention(monkeypatch)
    uploaded = Device.own

    def own(here: Device, *given: Any) -> None:
        """All but the requests' public columns."""
        uploaded(here, *[of for of in given if not (isinstance(of, dict) and "kv_positions" in of)])

    monkeypatch.setattr(Device, "own", own)
    assert any("a kernel is given torch.int32" in line for line in layer.run().broken)
