"""Metadata of a part of a batch is what vLLM's own builder makes of these rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from vllm_hypic.backends.linear.layout import StockRows
from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2
from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.pool.step import Batch, StepContext

CPU = torch.device("cpu")
Lengths = Sequence[tuple[int, int]]
BATCH: Lengths = ((5, 1), (9, 1), (30, 1), (3, 40), (16, 23), (0, 14), (0, 1))
"""Of each request: tokens behind it, tokens in this pass; three decodes."""


def built(kind: Any, lengths: Lengths, requests: Sequence[int], **more: Any) -> Any:
    """By vLLM, of these requests alone."""
    computed, scheduled = (torch.tensor(part) for part in zip(*(lengths[i] for i in requests), strict=True))
    builder: Any = kind.__new__(kind)
    builder.__dict__ |= more
    builder.kv_cache_spec, builder.device = None, CPU
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    builder.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)
    builder.num_spec_tokens, builder.decode_cudagraph_max_bs, builder.decode_bc_pre_scratch = 0, 0, None
    builder.use_spec_decode = builder.use_replayssm = builder.use_flashinfer_replayssm = False
    starts = torch.cat([torch.zeros(1), scheduled.cumsum(0)]).int()
    lens = (computed + scheduled).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(scheduled.max()),
        max_seq_len=int(lens.max()),
        block_table_tensor=torch.tensor([[i + 3, 0] for i in requests], dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([i >= 3 for i in requests]),
        seq_lens_cpu_upper_bound=lens,
    )
    return builder.build(0, common)


@pytest.mark.parametrize("requests", [range(7), [0, 2], [1, 3, 5], [4, 6], [3, 5, 6]], ids=str)
@pytest.mark.parametrize(
    ("layer", "kind", "more"),
    [
        (
            HypicCUDAMamba2,
            Mamba2AttentionMetadataBuilder,
            {"chunk_size": 16, "checkpoint_builder": SimpleNamespace(build=lambda *given: None)},
        ),
        (HypicCUDAShortConv, ShortConvAttentionMetadataBuilder, {}),
    ],
)
def test_a_part_is_described_as_vllm_would(layer: Any, kind: Any, more: Any, requests: Sequence[int]) -> None:
    computed, scheduled = (np.array(part) for part in zip(*BATCH, strict=True))
    step = StepContext([], [], CPU, Batch.of(computed, scheduled))
    starts = [0, *np.cumsum(scheduled[list(requests)]).tolist()]
    decodes = sum(i < 3 for i in requests)
    behind = computed[list(requests)].tolist()
    rows = StockRows(decodes, slice(0), starts, list(requests), behind)
    ours = layer.sub_batch(layer.__new__(layer), step, built(kind, BATCH, range(7), **more), rows)
    theirs = built(kind, BATCH, requests, **more)
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(wanted, torch.Tensor):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted), field.name
        elif field.name == "nums_dict":
            assert (mine is None) == (wanted is None) and str(mine) == str(wanted)
        else:
            assert mine == wanted, field.name
