"""Kernels that passes of layers launch, with and without windows and sinks and of latents, and those that the
layers' warm-up had launched before, recorded without a GPU; a program, with ``tests/triton`` among the paths
of Python.

Prints as JSON two lists: what was launched in both, and in a pass only.
"""

from __future__ import annotations

import json
from typing import Any

import attention_world as forward
import record_launches
import test_cuda_mla_forward as latents
import torch
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from vllm_hypic.backends.attention.base import AttentionLink
from vllm_hypic.patches import cuda_kept_lse

KINDS = (
    *((sinks, drafts, None) for sinks in (False, True) for drafts in (0, 3)),
    *((False, drafts, forward.SCALES) for drafts in (0, 3)),
)
"""Whether there are sinks, how many drafts, and scales where the cache is in FP8."""


def main() -> None:
    record_launches.install()
    flash_attn.flash_attn_varlen_func = forward.stand_in
    cuda_kept_lse.apply()
    forward.HEADS = 8  # so many that a prefill takes a tile of many rows
    warmed, launched = set[str](), set[str]()
    for window in (None, 20, 30, 64):
        for sinks, drafts, scales in KINDS:
            world = forward.World(
                torch.bfloat16,
                forward.angles(128),
                window=window,
                sinks=sinks,
                drafts=drafts,
                scales=scales,
            )
            link: Any = world.impl.link
            record_launches.RECORDED.clear()
            world.impl.connect(world.layer, AttentionLink(link.runtime, link.public, link.rope))
            mine = {*record_launches.RECORDED}
            record_launches.RECORDED.clear()
            world.forward()
            launched |= {*record_launches.RECORDED} - mine
            warmed |= mine & {*record_launches.RECORDED}
    TritonMLAImpl.forward_mqa = latents.decode_any  # type: ignore[method-assign]
    for neox in (False, True):
        for threshold in (1, 100):
            record_launches.RECORDED.clear()
            latent = latents.World(torch.bfloat16, neox, threshold=threshold)
            mine = {*record_launches.RECORDED}
            record_launches.RECORDED.clear()
            latent.forward()
            launched |= {*record_launches.RECORDED} - mine
            warmed |= mine & {*record_launches.RECORDED}
    print(json.dumps([sorted(warmed), sorted(launched)]))


if __name__ == "__main__":
    main()
