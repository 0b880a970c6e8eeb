"""A gated delta net of each kind that CUDA serves, on the CPU, in the world of ``mixed_batch``.

Stock vLLM's recurrence alone is a stand-in, which believes the metadata that it is given.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import mixed_batch
import pytest
import torch
from mixed_batch import ACCEPTED, ALL, CPU, TABLE, Lengths
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models import bailing_moe_v3
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.gdn.kimi_cuda import HypicCUDABailingDeltaNet, HypicCUDAKimiDeltaNet
from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights, reference
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.program import ordinary
from vllm_hypic.pool import tensors as pool_module
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.pool.transition_blocks import TransitionBlocks

TAPS = 4
NAME = "model.layers.0.linear_attn"


@dataclass(frozen=True)
class Kind:
    """One of vLLM's layers: its sizes, and how its graph calls it."""

    ours: type
    stock: tuple[type, str]
    """What stands in for vLLM's recurrence is this method."""
    key_heads: int
    V: int
    channel_gates: bool = True
    heads: int = 2
    K: int = 16
    norms: bool = False
    """The method norms its result, all rows of it."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.K + self.heads * self.V

    @property
    def gates(self) -> tuple[int, ...]:
        return (self.heads, self.K) if self.channel_gates else (self.heads,)

    @property
    def blocks(self) -> int:
        return 4 * 2 * self.heads

    def geometry(self, slots: int) -> PoolGeometry:
        """Of two layers: on a device their transition blocks stand side by side in one table."""
        sizes = self.heads, self.K, self.V, TAPS - 1, self.channels, torch.float32
        linear = tuple(LinearGeometry(name, *sizes) for name in ("before", NAME))
        return PoolGeometry((), linear, page_tokens=8, pages=0, slots=slots, transition_blocks=self.blocks)

    def weights(self, layer: Any) -> GatedDeltaWeights:
        """Stock's constants, with the epsilon of vLLM's CUDA kernels."""
        weight, bias = self.conv(layer).view(self.channels, TAPS), layer.dt_bias.view(self.gates)
        return GatedDeltaWeights.prepare(weight, None, layer.A_log, bias, self.key_heads, 1e-6)

    def conv(self, layer: Any) -> Tensor:
        return layer.conv1d.weight

    def complete(self, layer: Any) -> None:
        """What vLLM's layer of this kind has beside."""

    def projected(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Gates as the layer is given them, of random numbers."""
        return a, b

    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        """As the model's graph does."""
        raise NotImplementedError

    def finished(self, core: Tensor, rows: Tensor) -> Tensor:
        """What stock's method leaves of the recurrence's results, of these rows of the batch."""
        return core


class Qwen(Kind):
    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        qwen_gdn_linear_attn.qwen_gdn_attention_core(mixed, b, a, core, NAME)


class Kimi(Kind):
    """Its method norms the result with gates that are made of the row here."""

    def complete(self, layer: Any) -> None:
        layer.num_heads = layer.local_num_heads = self.heads
        layer.head_dim, layer.gate_lower_bound = self.K, None
        layer.o_norm = lambda core, gate: core * gate.view(core.shape)

    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        layer._forward(mixed, a[None], self.opening(mixed), b[None], core[None])

    def finished(self, core: Tensor, rows: Tensor) -> Tensor:
        return core * self.opening(rows)

    def opening(self, mixed: Tensor) -> Tensor:
        return 1 + torch.sigmoid(mixed[:, : self.heads, None].expand(-1, -1, self.K))


class Bailing(Kind):
    """Its operator is given q, k and v apart, log decays and write strengths."""

    def complete(self, layer: Any) -> None:
        layer.num_heads = layer.local_num_heads = self.heads
        layer.head_dim, layer.safe_gate, layer.lower_bound = self.K, True, -5.0
        for i, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            part = nn.Module()
            part.weight = nn.Parameter(layer.conv1d.weight.detach().chunk(3)[i])
            setattr(layer, name, part)
        del layer.conv1d

    def conv(self, layer: Any) -> Tensor:
        return torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])

    def weights(self, layer: Any) -> GatedDeltaWeights:
        return replace(super().weights(layer), gates_given=True)

    def projected(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.nn.functional.softplus(a - 3), torch.sigmoid(b)

    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        bailing_moe_v3.bailing_v3_kda_attention(*mixed.chunk(3, -1), a[None], b[None], core[None], NAME)


QWEN = Qwen(HypicCUDAGatedDeltaNet, (QwenGatedDeltaNetAttention, "_forward_core"), 1, 32, channel_gates=False)
KIMI = Kimi(HypicCUDAKimiDeltaNet, (KimiGatedDeltaNetAttention, "_forward"), 2, 16, norms=True)
BAILING = Bailing(HypicCUDABailingDeltaNet, (BailingMoeV3KimiDeltaAttention, "_forward"), 2, 16)


def bailing_stock(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, g1: Tensor, beta: Tensor, core: Tensor
) -> None:
    """vLLM's method of Bailing V3's layer."""
    stock_core(layer, torch.cat([q, k, v], -1), beta[0], g1[0], core[0])


def kimi_stock(layer: Any, mixed: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core: Tensor) -> None:
    """vLLM's method of Kimi's layer."""
    stock_core(layer, mixed, beta[0], g1[0], core[0])
    core.copy_(layer.o_norm(core, g2))


def stock_core(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
    """What vLLM computes for the batch that the metadata describes, and checks of that description."""
    m: GDNAttentionMetadata = get_forward_context().attn_metadata[NAME]
    x, tokens = GatedDeltaInputs(mixed_qkv, a, b), m.num_actual_tokens
    assert tokens == len(mixed_qkv)
    out = torch.zeros(tokens, layer.kind.heads, layer.kind.V, dtype=torch.float64)
    if m.spec_sequence_masks is None:
        assert m.num_spec_decodes == 0 and m.spec_sequence_masks_cpu is None
        out[:] = undrafted(layer, m, x)
    else:
        mine, others = m.spec_token_indx, m.non_spec_token_indx
        assert sorted([*mine.tolist(), *others.tolist()]) == list(range(tokens))
        assert len(mine) == m.num_spec_decode_tokens and m.num_decodes == 0
        out[mine] = drafted(layer, m, x.part(mine.long()))
        if m.num_prefills:
            out[others] = undrafted(layer, m, x.part(others))
        else:
            assert m.non_spec_query_start_loc is m.non_spec_state_indices_tensor is None
    core_attn_out[:tokens] = out.to(core_attn_out.dtype)
    layer.stock_rows += tokens


def install(patch: pytest.MonkeyPatch) -> None:
    """Stock code is the stand-in, and transition blocks stand as on a device."""
    for kind, stand_in in ((QWEN, stock_core), (KIMI, kimi_stock), (BAILING, bailing_stock)):
        patch.setattr(*kind.stock, stand_in)
    patch.setattr(pool_module, "TransitionBlocks", partial(TransitionBlocks, joint=True))


def undrafted(layer: Any, m: GDNAttentionMetadata, x: GatedDeltaInputs) -> Tensor:
    """Rows of requests that do not decode with drafts."""
    requests, decodes = m.num_decodes + m.num_prefills, m.num_decodes
    starts, slots = m.non_spec_query_start_loc, m.non_spec_state_indices_tensor
    assert starts.dtype == slots.dtype == torch.int32
    assert len(starts) == requests + 1 and len(slots) == requests
    bounds = starts.tolist()
    assert bounds[-1] == m.num_decode_tokens + m.num_prefill_tokens == len(x.mixed)
    assert bounds[decodes] == m.num_decode_tokens == decodes
    resumed = [True] * requests
    if m.num_prefills:
        resumed = m.has_initial_state.tolist()
        assert m.prefill_has_initial_state.tolist() == resumed[decodes:]
        assert m.prefill_query_start_loc.tolist() == [at - decodes for at in bounds[decodes:]]
        assert m.prefill_state_indices.tolist() == slots.tolist()[decodes:]
        lengths = [hi - lo for lo, hi in itertools.pairwise(bounds)]
        chunks = [[i, c] for i, n in enumerate(lengths[decodes:]) for c in range(-(-n // 64))]
        assert m.chunk_indices is not None and m.chunk_indices.tolist() == chunks
        assert m.chunk_offsets is not None and m.chunk_offsets[-1] == len(chunks)
        assert m.nums_dict is not None and m.batch_ptr is not None
        pieces = [i for i, n in enumerate(lengths) for _ in range(-(-n // 8))]
        assert m.batch_ptr[: len(pieces)].tolist() == pieces
    else:
        assert m.has_initial_state is m.chunk_indices is m.nums_dict is None
    conv, state = layer.kv_cache
    caches = LayerCaches(slots, conv[:, : TAPS - 1], state.transpose(2, 3))
    return recurrence(layer, caches, x, bounds, resumed)


def drafted(layer: Any, m: GDNAttentionMetadata, x: GatedDeltaInputs) -> Tensor:
    """Rows of requests that decode with drafts, as vLLM's kernels run them: a request goes on from the state
    in the slot of the last token accepted before, leaves one for each token, and keeps all that its
    convolution may need in its first slot, from the row of that token on."""
    table, accepted, starts = m.spec_state_indices_tensor, m.num_accepted_tokens, m.spec_query_start_loc
    assert len(table) == len(accepted) == len(starts) - 1 == m.num_spec_decodes
    conv, state = layer.kv_cache
    out = torch.zeros(len(x.mixed), layer.kind.heads, layer.kind.V, dtype=torch.float64)
    for i, (first, stop) in enumerate(itertools.pairwise(starts.tolist())):
        slots, last = table[i].tolist(), int(accepted[i]) - 1
        before = conv[slots[0], last : last + TAPS - 1].clone()
        held = state[slots[last]].transpose(1, 2)[None].double().clone()
        caches = LayerCaches(torch.zeros(1, dtype=torch.int32), before[None].clone(), held)
        for t in range(first, stop):
            out[t] = recurrence(layer, caches, x.part(slice(t, t + 1)), [0, 1], [True])[0]
            state[slots[t - first]] = held[0].transpose(1, 2).to(state.dtype)
        conv[slots[0], : TAPS - 2 + stop - first] = torch.cat([before[1:], x.mixed[first:stop]])
    return out


def recurrence(
    layer: Any, caches: LayerCaches, x: GatedDeltaInputs, bounds: Sequence[int], resumed: Sequence[bool]
) -> Tensor:
    """The delta rule over requests with these token rows, in float64."""
    out = torch.zeros(bounds[-1], layer.kind.heads, layer.kind.V, dtype=torch.float64)
    records = DevicePool(layer.kind.geometry(slots=1), CPU).linear[NAME]
    given = x, layer.kind.weights(layer), caches, out, records
    reference.gdn_compose(*given, *ordinary(bounds, resumed))
    return out


class World(mixed_batch.World):
    name, taps, rows, each_token = NAME, TAPS, "mixed", True

    def __init__(self, kind: Kind, lengths: Lengths = ALL) -> None:
        super().__init__(kind.ours, lengths)
        self.kind, layer = kind, self.layer
        self.width, self.norms_padding = (kind.heads, kind.V), kind.norms
        layer.tp_size, layer.num_k_heads, layer.num_v_heads = 1, kind.key_heads, kind.heads
        layer.kind, layer.head_k_dim, layer.head_v_dim = kind, kind.K, kind.V
        layer.conv1d = nn.Module()
        layer.conv1d.weight = nn.Parameter(0.5 * self.normal(kind.channels, 1, TAPS))
        layer.conv1d.bias = None
        layer.A_log = nn.Parameter(torch.log(1 + torch.rand(kind.heads, generator=self.gen)))
        layer.dt_bias = nn.Parameter(self.normal(*kind.gates).flatten() - 3)
        kind.complete(layer)
        # As vLLM's projection gives it: a part of wider rows.
        wide = torch.cat([self.token_rows(kind.channels), self.token_rows(8)], dim=1)
        self.mixed = wide[:, : kind.channels]
        self.a, self.b = kind.projected(self.token_rows(*kind.gates), self.token_rows(kind.heads))
        self.fill(kind.geometry(slots=4), kind.channels, kind.heads, kind.V, kind.K)
        self.records.transitions.fill_(torch.nan)
        for slot in (0, 1):
            self.pool.transition_blocks.offer(slot)
            blocks = self.records.block_of[slot].long()
            self.records.transitions[blocks] = (0.1 * self.normal(kind.heads, kind.K, kind.K)).half()
        # So that the captured record's transition blocks are not those that come next.
        self.pool.transition_blocks.offer(3)
        self.metadata = self._described()

    def _described(self) -> GDNAttentionMetadata:
        """As vLLM's builder describes the batch, where its decodes have drafts, too."""
        starts = torch.tensor(self.starts, dtype=torch.int32)
        slots = torch.stack([self.slots, self.slots * 0], 1)[:, 0]  # a column of a block table
        drafted, behind = 2 * self.drafted, self.starts[2]
        plain = GDNAttentionMetadata(
            num_prefills=len(self.lengths) - 2,
            num_prefill_tokens=self.tokens - behind,
            num_decodes=2 - drafted,
            num_decode_tokens=2 - drafted,
            num_spec_decodes=drafted,
            num_spec_decode_tokens=behind if drafted else 0,
            num_actual_tokens=self.tokens,
            non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=slots,
        )
        if not drafted:
            return plain
        masks = torch.arange(len(self.lengths)) < 2
        return replace(
            plain,
            spec_query_start_loc=starts[:3],
            non_spec_query_start_loc=starts[2:] - starts[2],
            spec_state_indices_tensor=TABLE,
            non_spec_state_indices_tensor=slots[2:],
            spec_sequence_masks=masks,
            spec_sequence_masks_cpu=masks,
            spec_token_indx=torch.arange(behind),
            non_spec_token_indx=torch.arange(behind, self.tokens),
            num_accepted_tokens=ACCEPTED,
        )

    def call(self, out: Tensor) -> None:
        self.kind.call(self.layer, self.mixed, self.a, self.b, out)

    def caches(self, conv: Tensor, *states: Tensor) -> LayerCaches:
        return LayerCaches(self.slots, conv, states[0].transpose(2, 3))

    def exactly(self, caches: Any, records: Any, composed: tuple[Tensor, Tensor], segments: Tensor) -> Tensor:
        out = torch.zeros(self.tokens, *self.width, dtype=torch.float64)
        x = GatedDeltaInputs(self.mixed, self.a, self.b)
        given = x, self.kind.weights(self.layer), caches, out, records
        reference.gdn_compose(*given, *composed)
        reference.gdn_segments(*given, segments, [])
        return self.kind.finished(out, self.mixed[: self.tokens].double())

    def exact_records(self) -> SimpleNamespace:
        records = super().exact_records()
        records.block_of[2] = torch.arange(self.kind.blocks - self.kind.heads, self.kind.blocks)  # nobody's
        return records

    def check_record(self, exact: Any) -> None:
        super().check_record(exact)
        blocks, wanted = self.records.block_of[2].long(), exact.block_of[2].long()
        alive = blocks >= 0
        assert alive.equal(wanted >= 0) and alive.any()
        error = self.records.transitions[blocks[alive]].double() - exact.transitions[wanted[alive]]
        assert error.abs().max() < 1e-3  # fp16
