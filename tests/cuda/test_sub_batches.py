"""Metadata of a part of a batch is what vLLM's own builder makes of these rows alone."""

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.layout import StockRows
from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2
from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.pool.step import Batch, StepContext

CPU = torch.device("cpu")
Lengths = Sequence[tuple[int, int]]
BATCH: Lengths = ((5, 1), (9, 1), (30, 1), (3, 40), (16, 23), (0, 14), (0, 1))
"""Of each request: tokens behind it, tokens in this pass; three decodes."""
DRAFTS = 3
DRAFTING: Lengths = ((5, 4), (9, 1), (30, 3), (3, 40), (16, 23), (0, 14), (0, 1))
"""The decodes have three drafts, none, and two."""
ACCEPTED = torch.tensor([2, 1, 4, 1, 1, 1, 1], dtype=torch.int32)


def built(kind: Any, lengths: Lengths, requests: Sequence[int], drafts: int = 0, **more: Any) -> Any:
    """By vLLM, of these requests alone.  ``drafts``: at most so many; the first three decode with them."""
    computed, scheduled = (torch.tensor(part) for part in zip(*(lengths[i] for i in requests), strict=True))
    builder: Any = kind.__new__(kind)
    builder.__dict__ |= more
    builder.kv_cache_spec, builder.device = None, CPU
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    builder.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)
    builder.num_spec_tokens = builder.num_spec = drafts
    builder.decode_cudagraph_max_bs, builder.decode_bc_pre_scratch = 0, None
    builder.use_spec_decode, builder.reorder_batch_threshold = drafts > 0, 1 + drafts
    builder.use_replayssm = builder.use_flashinfer_replayssm = builder.use_full_cuda_graph = False
    builder.gdn_prefill_backend = "triton"
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
        block_table_tensor=torch.tensor([[10 * i + t + 3 for t in range(5)] for i in requests]).int(),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([i >= 3 for i in requests]),
        seq_lens_cpu_upper_bound=lens,
    )
    if not drafts:
        return builder.build(0, common)
    drafted = [int(n) - 1 if i < 3 else -1 for i, n in zip(requests, scheduled, strict=True)]
    accepted, drafted = ACCEPTED[list(requests)], torch.tensor(drafted, dtype=torch.int32)
    return builder.build(0, common, num_accepted_tokens=accepted, num_decode_draft_tokens_cpu=drafted)


NO_CHECKPOINTS = {"checkpoint_builder": SimpleNamespace(build=lambda *given: None)}
KINDS = pytest.mark.parametrize(
    ("layer", "kind", "more"),
    [
        (HypicCUDAMamba2, Mamba2AttentionMetadataBuilder, {"chunk_size": 16} | NO_CHECKPOINTS),
        (HypicCUDAShortConv, ShortConvAttentionMetadataBuilder, {}),
        (HypicCUDAGatedDeltaNet, GDNAttentionMetadataBuilder, NO_CHECKPOINTS),
    ],
    ids=["Mamba2", "short convolution", "gated delta net"],
)


@KINDS
@pytest.mark.parametrize("requests", [range(7), [0, 2], [1, 3, 5], [4, 6], [3, 5, 6]], ids=str)
def test_a_part_is_described_as_vllm_would(layer: Any, kind: Any, more: Any, requests: Sequence[int]) -> None:
    compare(layer, kind, BATCH, requests, sum(i < 3 for i in requests), **more)


@KINDS
@pytest.mark.parametrize("requests", [range(7), [0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 3, 5, 6]], ids=str)
def test_requests_that_decode_with_drafts_are_described_as_vllm_would(
    layer: Any, kind: Any, more: Any, requests: Sequence[int]
) -> None:
    """All of them are in the part, with what was accepted and the slots of their drafts."""
    decodes = 0 if layer is HypicCUDAGatedDeltaNet else 3  # which counts them apart
    compare(layer, kind, DRAFTING, requests, decodes, drafts=DRAFTS, **more)


def test_a_request_with_drafts_is_never_left_out() -> None:
    with pytest.raises(RuntimeError, match="3 requests decode with drafts, but the rows hold only 2 of"):
        compare(
            *(HypicCUDAGatedDeltaNet, GDNAttentionMetadataBuilder, DRAFTING, [0, 2, 4], 0),
            drafts=DRAFTS,
            **NO_CHECKPOINTS,
        )


def compare(
    layer: Any, kind: Any, lengths: Lengths, requests: Sequence[int], decodes: int, **more: Any
) -> None:
    """Our part of the whole batch's metadata, and vLLM's own of these requests."""
    computed, scheduled = (np.array(part) for part in zip(*lengths, strict=True))
    step = StepContext([], [], CPU, Batch.of(computed, scheduled))
    starts = [0, *np.cumsum(scheduled[list(requests)]).tolist()]
    behind = computed[list(requests)].tolist()
    rows = StockRows(decodes, slice(0), starts, list(requests), behind)
    whole = built(kind, lengths, range(7), **more)
    ours = layer.sub_batch(made := layer.__new__(layer), step, whole, rows)
    assert made.requests(whole) == 7
    theirs = built(kind, lengths, requests, **more)
    assert type(ours) is type(theirs)
    for field in fields(theirs):
        mine, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(wanted, torch.Tensor):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted), field.name
        elif field.name == "nums_dict":
            assert (mine is None) == (wanted is None) and str(mine) == str(wanted)
        else:
            assert mine == wanted, field.name
