"""Kernels that passes launch with few heads a rank and with odd numbers of them, as tensor parallelism leaves
them, and those that the layers' warm-up had launched before, recorded without a GPU; a program like
``record_pass``.

Delta nets run a pass of a single row, too, whose parts of wider rows count as contiguous wherever they begin.
Prints as JSON, by kind of layer and heads: which kernels were warmed up and launched, what was launched in a
pass only, and which arguments of the former are less aligned than in the kernels' specifications.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import attention_world as forward
import delta_world
import record_launches
import test_cuda_mamba2_core as mamba2
import test_cuda_mla_forward as latents
import torch
from delta_world import Kimi, Qwen
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_hypic.backends.attention.base import AttentionLink
from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.gdn.kimi_cuda import HypicCUDAKimiDeltaNet
from vllm_hypic.backends.ops.compiled import kernel_modules, specs_of
from vllm_hypic.backends.ops.program import SegmentRow, pack
from vllm_hypic.patches import cuda_kept_lse
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.transition_blocks import TransitionBlocks

HEADS = (1, 2, 4, 6, 12, 32)
BF16 = torch.bfloat16


def of_layer(warm_up: Callable[[], object], *passes: Callable[[], object]) -> tuple[set[str], set[str]]:
    """What both launched, and what the passes alone."""
    record_launches.RECORDED.clear()
    warm_up()
    warmed = {*record_launches.RECORDED}
    record_launches.RECORDED.clear()
    for run in passes:
        run()
    launched = {*record_launches.RECORDED}
    return warmed & launched, launched - warmed


def attention(heads: int) -> tuple[set[str], set[str]]:
    forward.HEADS, forward.KV_HEADS = heads, 1 if heads < 12 else heads // 4
    world = forward.World(BF16, forward.angles(128), window=20)
    stock = forward.World(BF16, forward.angles(128))
    link: Any = world.impl.link

    def connect() -> None:
        for each in (world, stock):
            layer = SimpleNamespace(kv_cache=each.cache, dtype=BF16)
            each.impl.connect(layer, AttentionLink(link.runtime, link.public, link.rope))

    return of_layer(connect, world.forward, stock.forward)


def latent(heads: int) -> tuple[set[str], set[str]]:
    latents.HEADS = heads
    worlds: list[Any] = []
    return of_layer(lambda: worlds.append(latents.World(BF16)), lambda: worlds[0].forward())


def delta(heads: int, channel_gates: bool) -> tuple[set[str], set[str]]:
    delta_world.HEADS, delta_world.BLOCKS = heads, 4 * 2 * heads
    ours, key_heads = (HypicCUDAKimiDeltaNet, heads) if channel_gates else (HypicCUDAGatedDeltaNet, 1)
    gates = (heads, 16) if channel_gates else (heads,)
    # Results are what lay in memory: nobody looks at them.
    kind = (Kimi if channel_gates else Qwen)(ours, key_heads, 16, gates, norms=True)
    world = delta_world.World(kind)
    # As stock code's rows of queries, keys, values and gates, whose lengths are multiples of a head's.
    world.mixed = torch.cat([world.mixed, world.mixed], 1)[:, : kind.channels]

    def one() -> None:
        # Gates are a half each of what was projected; of a single row any part is contiguous where it lies.
        b, a = torch.cat([world.b[:1]] * 2, 1).chunk(2, 1)
        x = delta_world.Inputs(world.mixed[:1], world.a[:1] if channel_gates else a.contiguous(), b)
        (work,) = delta_world.linear_step(world.step, delta_world.BLOCK).segments
        row = SegmentRow(0, 0, 0, 1, 0, 1, 3, 0, 1, 1, 0, -1)
        one_row = replace(work, rows=pack([row], SegmentRow))
        world.layer.run_segments(world.runtime, world.step, one_row, x, torch.empty(1, heads, 16))

    context = ForwardContext(
        no_compile_layers={}, attn_metadata={delta_world.NAME: world.metadata}, slot_mapping={}
    )
    with override_forward_context(context):
        return of_layer(lambda: world.layer.warm_up(world.runtime), lambda: world.run(world.step), one)


def scanned(heads: int) -> tuple[set[str], set[str]]:
    mamba2.HEADS, mamba2.INNER = heads, heads * mamba2.P
    mamba2.CHANNELS = mamba2.INNER + 2 * mamba2.N
    world = mamba2.World()
    return of_layer(lambda: world.layer.warm_up(world.runtime), lambda: world.run(world.step))


def beyond_specs(launch: str) -> set[str]:
    """Arguments of a launch that are less aligned than in any specification of its kernel."""
    name, types, aligned, constants, *_ = json.loads(launch)
    found = [
        {*spec.aligned} & {*types} - {*aligned}
        for spec in SPECS
        if spec.function.__name__ == name and {*spec.function.arg_names} == {*types, *constants}
    ]
    return min(found, key=len)


SPECS = [spec for module in kernel_modules() for spec in specs_of(module)]
KINDS: dict[str, Callable[[int], tuple[set[str], set[str]]]] = {
    "attention": attention,
    "latents": latent,
    "delta nets": lambda heads: delta(heads, False),
    "delta nets, gates of channels": lambda heads: delta(heads, True),
    "Mamba2": scanned,
}


def main() -> None:
    record_launches.install()
    flash_attn.flash_attn_varlen_func = forward.stand_in
    cuda_kept_lse.apply()
    TritonMLAImpl.forward_mqa = latents.decode_any  # type: ignore[method-assign]
    for stock, name in (
        (QwenGatedDeltaNetAttention, "_forward_core"),
        (KimiGatedDeltaNetAttention, "_forward"),
        (MambaMixer2, "conv_ssm_forward"),
    ):
        setattr(stock, name, lambda *given: None)
    pool_module.TransitionBlocks = partial(TransitionBlocks, joint=True)
    found = {}
    with torch.inference_mode():
        for kind, run in KINDS.items():
            for heads in HEADS:
                both, cold = run(heads)
                names = sorted({json.loads(one)[0] for one in both})
                beyond = {json.loads(one)[0]: sorted(beyond_specs(one)) for one in both}
                found[f"{kind}, {heads} heads"] = names, sorted(cold), {k: v for k, v in beyond.items() if v}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
