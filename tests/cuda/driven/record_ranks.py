"""Kernels that passes launch, and those that the layers' warm-up had launched before, recorded without a GPU.

A program, with the tests' folders and ``tests/cuda/triton`` among the paths of Python. It prints as JSON, by
kind of layer and heads a rank, few and odd numbers of them as tensor parallelism leaves them: which kernels
were warmed up and launched, what was launched in a pass only, and which arguments of the former are less
aligned than in the kernels' specifications. Delta nets run a pass of a single row, too, whose parts of wider
rows count as contiguous wherever they begin. Then it prints two lists, of attention with and without windows
and sinks and of latents: what was launched in both, and in a pass only.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import attention_world as forward
import delta_world
import mamba_worlds
import record_launches
import test_cuda_mla_forward as latents
import torch
from delta_world import KIMI, QWEN
from mixed_batch import BLOCK
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from benchmarks.kernel_specs import all_specs
from vllm_hypic.backends.attention.base import AttentionLink
from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs
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
    world = forward.World(BF16, forward.TABLE, window=20)
    stock = forward.World(BF16, forward.TABLE)
    link: Any = world.impl.link

    def connect() -> None:
        for each in (world, stock):
            layer = SimpleNamespace(kv_cache=each.cache, dtype=BF16)
            each.impl.connect(layer, AttentionLink(link.runtime, link.public, link.rope))

    return of_layer(connect, world.forward, stock.forward)


def latent(heads: int, **kind: Any) -> tuple[set[str], set[str]]:
    latents.HEADS = heads
    worlds: list[Any] = []
    return of_layer(lambda: worlds.append(latents.World(BF16, **kind)), lambda: worlds[0].forward())


def delta(heads: int, channel_gates: bool) -> tuple[set[str], set[str]]:
    kind = replace(KIMI, key_heads=heads) if channel_gates else QWEN
    # Results are what lay in memory: nobody looks at them.
    world = delta_world.World(replace(kind, heads=heads, V=16, norms=True))
    # As stock code's rows of queries, keys, values and gates, whose lengths are multiples of a head's.
    world.mixed = torch.cat([world.mixed, world.mixed], 1)[:, : world.kind.channels]

    def one() -> None:
        # Gates are a half each of what was projected; of a single row any part is contiguous where it lies.
        b, a = torch.cat([world.b[:1]] * 2, 1).chunk(2, 1)
        x = GatedDeltaInputs(world.mixed[:1], world.a[:1] if channel_gates else a.contiguous(), b)
        (work,) = linear_step(world.step, BLOCK).segments
        row = SegmentRow(0, 0, 0, 1, 0, 1, 3, 0, 1, 1, 0, -1)
        one_row = replace(work, rows=pack([row], SegmentRow))
        world.layer.run_segments(world.runtime, world.step, one_row, x, torch.empty(1, heads, 16))

    with world.context(world.metadata):
        return of_layer(lambda: world.layer.warm_up(world.runtime), lambda: world.run(world.step), one)


def scanned(heads: int) -> tuple[set[str], set[str]]:
    world = mamba_worlds.Mamba2(heads=heads)
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


SPECS = [spec for specs in all_specs().values() for spec in specs]
KINDS: dict[str, Callable[[int], tuple[set[str], set[str]]]] = {
    "attention": attention,
    "latents": latent,
    "delta nets": lambda heads: delta(heads, False),
    "delta nets, gates of channels": lambda heads: delta(heads, True),
    "Mamba2": scanned,
}


def of_ranks() -> dict[str, Any]:
    found = {}
    for kind, run in KINDS.items():
        for heads in HEADS:
            both, cold = run(heads)
            names = sorted({json.loads(one)[0] for one in both})
            beyond = {json.loads(one)[0]: sorted(beyond_specs(one)) for one in both}
            found[f"{kind}, {heads} heads"] = names, sorted(cold), {k: v for k, v in beyond.items() if v}
    return found


def of_attention() -> list[list[str]]:
    forward.HEADS, forward.KV_HEADS = 8, 2  # so many that a prefill takes a tile of many rows
    found = [latent(4, neox=neox, threshold=n) for neox in (False, True) for n in (1, 100)]
    # Whether there are sinks, how many drafts, and scales where the cache is in FP8.
    kinds = [(sinks, drafts, None) for sinks in (False, True) for drafts in (0, 3)]
    for window in (None, 20, 30, 64):
        for sinks, drafts, scales in (*kinds, *((False, drafts, forward.SCALES) for drafts in (0, 3))):
            kind = {"window": window, "sinks": sinks, "drafts": drafts, "scales": scales}
            world = forward.World(BF16, forward.TABLE, **kind)
            link: Any = world.impl.link
            plain = AttentionLink(link.runtime, link.public, link.rope)
            found.append(of_layer(partial(world.impl.connect, world.layer, plain), world.forward))
    return [sorted(set[str]().union(*part)) for part in zip(*found, strict=True)]


def main() -> None:
    record_launches.install()
    flash_attn.flash_attn_varlen_func = forward.stand_in
    cuda_kept_lse.apply()
    TritonMLAImpl.forward_mqa = latents.decode_any  # type: ignore[method-assign]
    for stock, name in (QWEN.stock, KIMI.stock, (MambaMixer2, "conv_ssm_forward")):
        setattr(stock, name, lambda *given: None)
    pool_module.TransitionBlocks = partial(TransitionBlocks, joint=True)
    attention = of_attention()
    with torch.inference_mode():
        print(json.dumps([of_ranks(), attention]))


if __name__ == "__main__":
    main()
