"""A Mamba2 layer and a short convolution as CUDA runs them, on the CPU, in the worlds of ``mixed_batch``."""

import itertools
from types import SimpleNamespace
from typing import Any

import mixed_batch
import pytest
import torch
from mixed_batch import ALL, CPU, Lengths, accepted_, described, metadata_of
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2
from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.backends.ops.linear_layer.arguments import ConvolutionCaches, LayerCaches
from vllm_hypic.backends.ops.mamba2 import reference as mamba2_reference
from vllm_hypic.backends.ops.short_conv import ShortConvInputs
from vllm_hypic.backends.ops.short_conv import reference as convolution_reference
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.states import ConvGeometry, DecayGeometry
from vllm_hypic.pool.tensors import DevicePool

CHUNK = 8
"""Token rows of a chunk of vLLM's scan."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Stock code is the stand-ins."""
    patch.setattr(mamba_mixer2.MambaMixer2, "conv_ssm_forward", scan)
    patch.setattr(short_conv.ShortConv, "forward_cuda", convolve)
    patch.setattr(short_conv, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def no_records(layer: Any) -> Any:
    """Records that stock code does not look at."""
    return DevicePool(layer.geometry(1), CPU).linear[layer.prefix]


def scan(layer: Any, projected_states: Tensor, output: Tensor) -> None:
    """What vLLM's Mamba2 computes for the batch that the metadata describes, which is checked."""
    m: Mamba2AttentionMetadata = get_forward_context().attn_metadata[layer.prefix]
    slots, program = described(m, layer.lengths)
    assert m.chunk_size == CHUNK and m.checkpoint_chunk_idx is m.checkpoint_meta is None
    if m.num_prefills:
        assert m.prep_initial_states == bool(m.has_initial_states_p.any())
        check_chunks(m)
    else:
        assert m.cu_chunk_seqlen_p is m.seq_idx_p is m.last_chunk_indices_p is None
    tokens = m.num_decode_tokens + m.num_prefill_tokens
    out = torch.zeros(len(projected_states), output.shape[1], dtype=torch.float64)
    x, heads = layer.by_head(SimpleNamespace(projected=projected_states), out)
    accepted_(layer.lengths, *layer.kv_cache)
    given = x, layer.weights(), layer.caches(slots), heads, no_records(layer)
    mamba2_reference.mamba2_compose(*given, *program)
    output[:tokens] = out[:tokens].to(output.dtype)
    layer.stock_rows += tokens


def check_chunks(m: Mamba2AttentionMetadata) -> None:
    """Chunks end where those of the whole request do: at multiples of their size."""
    parts = m.cu_chunk_seqlen_p, m.seq_idx_p, m.last_chunk_indices_p
    assert m.query_start_loc_p is not None and all(p is not None and p.dtype == torch.int32 for p in parts)
    starts, ends = m.query_start_loc_p.tolist(), m.seq_lens.tolist()[m.num_decodes :]
    wanted: tuple[list[int], list[int], list[int]] = ([0], [], [])
    for i, (first, stop) in enumerate(itertools.pairwise(starts)):
        behind = ends[i] - (stop - first)
        for at in range(behind, ends[i]):
            if (at + 1) % CHUNK == 0 or at + 1 == ends[i]:
                wanted[0].append(first + at + 1 - behind)
                wanted[1].append(i)
        wanted[2].append(len(wanted[1]) - 1)
    assert tuple(p.tolist() for p in parts if p is not None) == wanted


class Mamba2(mixed_batch.World):
    name, taps, rows = "model.layers.0.mixer", 4, "projected"

    def __init__(self, lengths: Lengths = ALL, heads: int = 2, P: int = 16, N: int = 32) -> None:
        super().__init__(HypicCUDAMamba2, lengths)
        inner, channels = heads * P, heads * P + 2 * N
        self.width, layer = (inner,), self.layer
        layer.tp_size, layer.n_groups, layer.head_dim, layer.ssm_state_size = 1, 1, P, N
        layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size = inner, channels, heads
        layer.conv_kernel_size = self.taps
        layer.conv1d = nn.Module()
        layer.conv1d.bias = nn.Parameter(0.1 * self.normal(channels))
        layer.conv_weights = 0.5 * self.normal(channels, self.taps)
        layer.A = nn.Parameter(-0.2 - torch.rand(heads, generator=self.gen))
        layer.dt_bias, layer.D = nn.Parameter(self.normal(heads) - 1), nn.Parameter(self.normal(heads))
        decay = DecayGeometry(self.name, heads, P, N, self.taps - 1, channels, torch.float32)
        layer.geometry = lambda slots: PoolGeometry((), (decay,), page_tokens=8, pages=0, slots=slots)
        self.projected = self.token_rows(inner + channels + heads)
        self.fill(layer.geometry(4), channels, heads, P, N)
        self.records.log_transition[:2].abs_().neg_()
        self.metadata = metadata_of(Mamba2AttentionMetadata, lengths, chunk_size=CHUNK)

    def call(self, out: Tensor) -> None:
        mamba_mixer2.mamba_mixer2(self.projected, out, self.name)

    def caches(self, conv: Tensor, *states: Tensor) -> LayerCaches:
        return LayerCaches(self.slots, conv, states[0])

    def exactly(self, caches: Any, records: Any, composed: tuple[Tensor, Tensor], segments: Tensor) -> Tensor:
        out = torch.zeros(self.tokens, *self.width, dtype=torch.float64)
        x, heads = self.layer.by_head(SimpleNamespace(projected=self.projected[: self.tokens]), out)
        given = x, self.layer.weights(), caches, heads, records
        mamba2_reference.mamba2_compose(*given, *composed)
        mamba2_reference.mamba2_segments(*given, segments, [])
        return out


class Projection(nn.Linear):
    """As vLLM's: its result and a bias that was left out."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def convolved(
    layer: Any, hidden: Tensor, caches: Any, records: Any, composed: Any, segments: Any = None
) -> Tensor:
    """The rows' outputs by the references; caches and records are written."""
    B, C, h = layer.in_proj(hidden)[0].chunk(3, dim=-1)
    x, out = ShortConvInputs(B * h, C), torch.zeros(hidden.shape, dtype=torch.float64)
    given = x, layer.weights(), caches, out, records
    convolution_reference.short_conv_compose(*given, *composed)
    if segments is not None:
        convolution_reference.short_conv_segments(*given, segments)
    return out @ layer.out_proj.weight.double().T


def convolve(layer: Any, hidden_states: Tensor, output: Tensor) -> None:
    """What vLLM's short convolution computes for the batch that the metadata describes."""
    m: ShortConvAttentionMetadata = get_forward_context().attn_metadata[layer.prefix]
    slots, program = described(m, layer.lengths)
    tokens = m.num_decode_tokens + m.num_prefill_tokens
    accepted_(layer.lengths, *layer.kv_cache)
    out = convolved(layer, hidden_states[:tokens], layer.caches(slots), no_records(layer), program)
    output[:tokens] = out.to(output.dtype)
    layer.stock_rows += tokens


class ShortConv(mixed_batch.World):
    """What is cached went through a projection of other rows beside it."""

    name, taps, rows, rounds_inputs = "model.layers.0.conv", 3, "hidden", True

    def __init__(self, lengths: Lengths = ALL, size: int = 24) -> None:
        super().__init__(HypicCUDAShortConv, lengths)
        self.width, layer = (size,), self.layer
        layer.L_cache, layer.conv_dim, layer.conv = self.taps, size, nn.Module()
        layer.conv.weight, layer.conv.bias = nn.Parameter(self.normal(size, 1, self.taps)), None
        layer.in_proj = Projection(size, 3 * size, bias=False)
        layer.out_proj = Projection(size, size, bias=False)
        conv = ConvGeometry(self.name, self.taps - 1, size, torch.float32)
        layer.geometry = lambda slots: PoolGeometry((), (conv,), page_tokens=8, pages=0, slots=slots)
        self.hidden = self.token_rows(size)
        self.fill(layer.geometry(4), size)
        self.metadata = metadata_of(ShortConvAttentionMetadata, lengths)

    def call(self, out: Tensor) -> None:
        short_conv.short_conv(self.hidden, out, self.name)

    def caches(self, conv: Tensor, *states: Tensor) -> ConvolutionCaches:
        return ConvolutionCaches(self.slots, conv)

    def exactly(self, caches: Any, records: Any, composed: tuple[Tensor, Tensor], segments: Tensor) -> Tensor:
        return convolved(self.layer, self.hidden[: self.tokens], caches, records, composed, segments)
