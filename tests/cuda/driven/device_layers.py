"""A layer of each kind in a pass that is watched as a GPU would be: see ``device_rules.py``.

Each has ``run``, which runs the pass; ``bound``, the bytes that it may take by the layer's own books; and
``planted``, a method that the pass calls, and how its arguments name rows.
"""

from dataclasses import replace
from typing import Any

import attention_world as attention
import delta_world
import mamba_worlds
import mixed_batch
import numpy as np
import pytest
import test_cuda_decode_graphs as decodes
import test_cuda_mla_forward as latents
import torch
from device_rules import Device, device
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv as StockShortConv
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_hypic.backends.attention import cuda as attention_layer
from vllm_hypic.backends.attention import cuda_mla, cuda_rows
from vllm_hypic.backends.linear.gdn import cuda as delta_layer
from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2
from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.backends.ops.span_attention import plan as span_plan
from vllm_hypic.backends.ops.span_attention.fixed import FixedPlans
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.step import StepContext

Patch = pytest.MonkeyPatch
PARTS = 4
"""Columns of a part, in which all columns of a request of the worlds make several."""


class Attention:
    """A layer of wide heads in a pass whose requests that decode have many rows; partial results are those of
    16 rows at a time."""

    planted = attention_layer.HypicCUDAAttentionImpl, "heads", lambda query: query

    def __init__(self, patch: Patch, **kind: Any) -> None:
        patch.setattr(attention, "HEADS", 8)
        patch.setattr(attention, "SIZE", 128)
        patch.setattr(cuda_rows, "SHORTEST", 4)
        patch.setattr(span_plan, "part_columns", lambda *_: PARTS)
        for module in (cuda_rows, attention_layer):
            patch.setattr(module, "PARTIAL_BYTES", 16 * 3 * 8 * 129 * 4)
        self.patch = patch
        self.world = attention.World(torch.bfloat16, attention.TABLE, drafts=23, **kind)

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


class Latents:
    """Latent attention in a pass with a long composed prefill."""

    planted = cuda_mla.CUDALatentAttention, "absorbed", lambda layer, nope: nope

    def __init__(self, patch: Patch) -> None:
        lengths = [*latents.LENGTHS]
        lengths[2] = lengths[2][0], 60
        patch.setattr(latents, "LENGTHS", tuple(lengths))
        patch.setattr(latents, "RANK", 256)
        patch.setattr(latents, "SIZE", 256 + latents.ROPE)
        patch.setattr(cuda_rows, "SHORTEST_OF_LATENTS", 4)
        patch.setattr(span_plan, "part_columns", lambda *_: PARTS)
        for module in (cuda_rows, cuda_mla):
            patch.setattr(module, "PARTIAL_BYTES", 970_000)
        patch.setattr(TritonMLAImpl, "forward_mqa", latents.decode_any)
        self.patch = patch
        self.world = latents.World(torch.bfloat16)

    def run(self) -> Device:
        world, whole = self.world, self.world.metadata
        with device(self.patch) as here, self.patch.context() as patch:
            here.own(vars(world.pool.kv["layer"]), world.query, world.latent, world.key, world.cache)
            here.own(world.table, world.layer.W_UK_T, world.layer.W_UV, world.up, world.layer._k_scale)
            here.own(vars(whole), vars(whole.prefill), vars(whole.decode))
            here.own(*[vars(composed.stream) for composed in world.step.composed])
            stock = world.layer.forward_impl

            def forward(*given: Any, output: Tensor) -> Any:
                here.own(output)
                return stock(*given, output=output)

            patch.setattr(type(world), "metadata", whole)
            patch.setitem(vars(world.layer), "forward_impl", forward)
            world.forward()
        assert world.runtime.calls == {"capture_kv": 1, "span_attention": 2}
        return here

    def bound(self) -> int:
        return int(self.world.impl.scratch_bytes(self.world.starts[-1], self.world.dtype))


class Linear:
    """A linear layer in a pass; ``stock``: the class and the name of the method that is stock code's."""

    def __init__(self, patch: Patch, world: mixed_batch.World, *owned: Any) -> None:
        self.patch, self.world, self.owned = patch, world, owned
        self.calls = {"capture_linear": 1, "compose": 1}

    def run(self) -> Device:
        world, layer = self.world, self.world.layer
        with device(self.patch) as here, self.patch.context() as patch, torch.no_grad():
            here.own(list(layer.parameters()), layer.kv_cache, vars(world.records), *self.owned)
            here.own([t for name, t in vars(world.metadata).items() if not name.endswith("_cpu")])
            patch.setattr(*self.stock, here.stock(getattr(*self.stock)))
            stock, projection = world.call, mamba_worlds.Projection.forward

            def call(out: Tensor) -> None:
                here.own(out)
                stock(out)

            def projected(layer: Any, x: Tensor) -> Any:
                made = projection(layer, x)
                here.count(made)
                return made

            patch.setattr(world, "call", call)
            patch.setattr(mamba_worlds.Projection, "forward", projected)
            world.run(world.step)
        assert world.runtime.calls == self.calls
        return here

    def bound(self) -> int:
        """Without what interiors carry between passes: here none is cut."""
        own = self.world.layer.scratch(self.world.tokens, torch.float32)
        return int(own.working - own.carried)


class Delta(Linear):
    """A gated delta net in a pass of ``segments`` requests of ``rows`` rows each, the last ones of five, and
    two that decode; the third is composed where it is none of them.

    ``at_once``: summaries of so many are had at a time, and what the chunks of so many may lack.
    """

    planted = delta_layer.CUDADeltaNet, "run_segments", lambda runtime, step, segments, x, out: x.mixed

    def __init__(
        self, patch: Patch, kind: delta_world.Kind, at_once: int, rows: int = 32, segments: int = 2
    ) -> None:
        lengths = [*mixed_batch.ALL[: 5 - segments], *[(2, rows)] * (segments - 1), (0, rows)]
        kind = replace(kind, K=64, V=64)
        world = delta_world.World(kind, lengths)
        super().__init__(patch, world, world.mixed, world.a, world.b)
        self.stock = kind.stock
        captures = {}
        for i, slot in zip(range(5 - segments, 5), (2, 3, 1), strict=False):
            s0 = lengths[i][0]
            captures[i] = CapturePlan(s0, s0 + rows, slot, np.arange(rows), None, leading=False)
        composed = world.step.composed if segments == 2 else []
        world.step = replace(mixed_batch.pass_of(lengths, {}, captures), composed=composed)
        world.layer.conv_dim = kind.channels
        world.pool.transition_blocks.release([3, *([] if composed else [1])])
        layer = world.layer
        patch.setattr(delta_layer, "SUMMARY_BYTES", at_once * layer._summary_bytes())
        patch.setattr(delta_layer, "UNFILLED_BYTES", at_once * (-rows % 32) * layer.terms_bytes())
        if not composed:
            del self.calls["compose"]

    def bound(self) -> int:
        return int(self.world.layer.scratch(self.world.tokens, torch.float32).working)


class Mamba2(Linear):
    """A Mamba2 layer in a pass whose last request is a long prefill of stock code's."""

    planted = HypicCUDAMamba2, "run_segments", lambda runtime, step, segments, x, out: x.projected
    stock = MambaMixer2, "conv_ssm_forward"

    def __init__(self, patch: Patch) -> None:
        world = mamba_worlds.Mamba2((*mixed_batch.ALL[:-1], (0, 300)), P=64, N=64)
        world.layer._weights()  # made once, of the model's
        super().__init__(patch, world, world.projected, vars(world.layer._constants))


class ShortConv(Linear):
    """A short convolution in a pass with a long segment request."""

    planted = HypicCUDAShortConv, "projected", lambda x, out, tokens, run: x.hidden
    stock = StockShortConv, "forward_cuda"

    def __init__(self, patch: Patch) -> None:
        world = mamba_worlds.ShortConv((*mixed_batch.DECODES[:3], (2, 300)), size=96)
        world.layer._weights()
        super().__init__(patch, world, world.hidden, vars(world.layer._constants))


class Decodes:
    """Attention in a pass that decodes composed requests, as a full graph has it."""

    planted = attention_layer.HypicCUDAAttentionImpl, "_add_decoded", lambda link, plans, query, output: query

    def __init__(self, patch: Patch) -> None:
        self.patch, self.world = patch, decodes.World()

    def run(self) -> Device:
        world = self.world
        with device(self.patch) as here, self.patch.context() as patch:
            here.own(vars(world.public), world.query, world.output, world.cache, world.table)
            here.own(vars(world.metadata), [vars(plans) for plans in world.plans._made.values()])
            patch.setattr(flash_attn, "flash_attn_varlen_func", here.stock(decodes.padded))
            # An upload.
            patch.setattr(FixedPlans, "_write", here.stock(FixedPlans._write))
            made = world.step

            def step(*given: Any) -> StepContext:
                found = made(*given)
                here.own(vars(found.decoding))
                return found

            patch.setattr(world, "step", step)
            world.enter(["plain", "one", "long"], [5, 20, 30])
            before = here.held
            world.forward()
        assert world.runtime.calls == {"span_attention": 1}
        self.entered = before
        return here

    def bound(self) -> int:
        """Of what is allocated in the pass, and in what is done before it."""
        [plans] = self.world.plans._made.values()
        return plans.result_bytes(decodes.ROWS) + self.entered
