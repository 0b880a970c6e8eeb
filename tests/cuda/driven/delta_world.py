"""A gated delta net of each kind that CUDA serves, on the CPU, and a mixed batch for it.

Stock vLLM's recurrence alone is a stand-in, which believes the metadata that it is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.models import bailing_moe_v3
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.gdn.kimi_cuda import HypicCUDABailingDeltaNet, HypicCUDAKimiDeltaNet
from vllm_hypic.backends.linear.layout import linear_step
from vllm_hypic.backends.ops.gated_delta import Caches, Inputs, Weights, reference
from vllm_hypic.backends.ops.program import ComposeOp, ComposeRow, Mode, pack
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.states import LinearGeometry
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import DevicePool

CPU = torch.device("cpu")
HEADS, K, TAPS = 2, 16, 4
NAME = "model.layers.0.linear_attn"
BLOCK = 8
"""Tokens of a KV block: where stock code takes over again."""


@dataclass(frozen=True)
class Kind:
    """One of vLLM's layers: its sizes, and how its graph calls it."""

    ours: type
    key_heads: int
    V: int
    gates: tuple[int, ...]
    norms: bool = False
    """The method norms its result, all rows of it."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * K + HEADS * self.V

    def weights(self, layer: Any) -> Weights:
        """Stock's constants, with the epsilon of vLLM's CUDA kernels."""
        weight, bias = self.conv(layer).view(self.channels, TAPS), layer.dt_bias.view(self.gates)
        return Weights.prepare(weight, None, layer.A_log, bias, self.key_heads, 1e-6)

    def conv(self, layer: Any) -> Tensor:
        weight: Tensor = layer.conv1d.weight
        return weight

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
        layer.num_heads = layer.local_num_heads = HEADS
        layer.head_dim, layer.gate_lower_bound = K, None
        layer.o_norm = lambda core, gate: core * gate.view(core.shape)

    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        layer._forward(mixed, a[None], opening(mixed), b[None], core[None])

    def finished(self, core: Tensor, rows: Tensor) -> Tensor:
        return core * opening(rows)


class Bailing(Kind):
    """Its operator is given q, k and v apart, log decays and write strengths."""

    def complete(self, layer: Any) -> None:
        layer.num_heads = layer.local_num_heads = HEADS
        layer.head_dim, layer.safe_gate, layer.lower_bound = K, True, -5.0
        for i, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            part = nn.Module()
            part.weight = nn.Parameter(layer.conv1d.weight.detach().chunk(3)[i])
            setattr(layer, name, part)
        del layer.conv1d

    def conv(self, layer: Any) -> Tensor:
        return torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])

    def weights(self, layer: Any) -> Weights:
        return replace(super().weights(layer), gates_given=True)

    def projected(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.nn.functional.softplus(a - 3), torch.sigmoid(b)

    def call(self, layer: Any, mixed: Tensor, a: Tensor, b: Tensor, core: Tensor) -> None:
        bailing_moe_v3.bailing_v3_kda_attention(*mixed.chunk(3, -1), a[None], b[None], core[None], NAME)


def opening(mixed: Tensor) -> Tensor:
    return 1 + torch.sigmoid(mixed[:, :HEADS, None].expand(-1, -1, K))


QWEN = Qwen(HypicCUDAGatedDeltaNet, 1, 32, (HEADS,))
KIMI = Kimi(HypicCUDAKimiDeltaNet, HEADS, K, (HEADS, K), norms=True)


BAILING = Bailing(HypicCUDABailingDeltaNet, HEADS, K, (HEADS, K))


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
    x, tokens = Inputs(mixed_qkv, a, b), m.num_actual_tokens
    assert tokens == len(mixed_qkv)
    out = torch.zeros(tokens, HEADS, layer.kind.V, dtype=torch.float64)
    if m.spec_sequence_masks is None:
        assert m.num_spec_decodes == 0 and m.spec_sequence_masks_cpu is None
        out[:] = undrafted(layer, m, x)
    else:
        mine, others = m.spec_token_indx, m.non_spec_token_indx
        assert mine is not None and others is not None
        assert sorted([*mine.tolist(), *others.tolist()]) == list(range(tokens))
        assert len(mine) == m.num_spec_decode_tokens and m.num_decodes == 0
        out[mine] = drafted(layer, m, x.part(mine.long()))
        if m.num_prefills:
            out[others] = undrafted(layer, m, x.part(others))
        else:
            assert m.non_spec_query_start_loc is m.non_spec_state_indices_tensor is None
    core_attn_out[:tokens] = out.to(core_attn_out.dtype)
    layer.stock_rows += tokens


def undrafted(layer: Any, m: GDNAttentionMetadata, x: Inputs) -> Tensor:
    """Rows of requests that do not decode with drafts."""
    requests, decodes = m.num_decodes + m.num_prefills, m.num_decodes
    starts, slots = m.non_spec_query_start_loc, m.non_spec_state_indices_tensor
    assert starts is not None and slots is not None
    assert starts.dtype == slots.dtype == torch.int32
    assert len(starts) == requests + 1 and len(slots) == requests
    bounds = starts.tolist()
    assert bounds[-1] == m.num_decode_tokens + m.num_prefill_tokens == len(x.mixed)
    assert bounds[decodes] == m.num_decode_tokens == decodes
    resumed = [True] * requests
    if m.num_prefills:
        assert m.has_initial_state is not None and m.prefill_has_initial_state is not None
        resumed = m.has_initial_state.tolist()
        assert m.prefill_has_initial_state.tolist() == resumed[decodes:]
        assert m.prefill_query_start_loc is not None and m.prefill_state_indices is not None
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
    return recurrence(layer, Caches(slots, conv[:, : TAPS - 1], state.transpose(2, 3)), x, bounds, resumed)


def drafted(layer: Any, m: GDNAttentionMetadata, x: Inputs) -> Tensor:
    """Rows of requests that decode with drafts, as vLLM's kernels run them: a request goes on from the state
    in the slot of the last token accepted before, leaves one for each token, and keeps all that its
    convolution may need in its first slot, from the row of that token on."""
    table, accepted, starts = m.spec_state_indices_tensor, m.num_accepted_tokens, m.spec_query_start_loc
    assert table is not None and accepted is not None and starts is not None
    assert len(table) == len(accepted) == len(starts) - 1 == m.num_spec_decodes
    conv, state = layer.kv_cache
    out = torch.zeros(len(x.mixed), HEADS, layer.kind.V, dtype=torch.float64)
    for i, (first, stop) in enumerate(itertools.pairwise(starts.tolist())):
        slots, last = table[i].tolist(), int(accepted[i]) - 1
        before = conv[slots[0], last : last + TAPS - 1].clone()
        held = state[slots[last]].transpose(1, 2)[None].double().clone()
        caches = Caches(torch.zeros(1, dtype=torch.int32), before[None].clone(), held)
        for t in range(first, stop):
            out[t] = recurrence(layer, caches, x.part(slice(t, t + 1)), [0, 1], [True])[0]
            state[slots[t - first]] = held[0].transpose(1, 2).to(state.dtype)
        conv[slots[0], : TAPS - 2 + stop - first] = torch.cat([before[1:], x.mixed[first:stop]])
    return out


def recurrence(
    layer: Any, caches: Caches, x: Inputs, bounds: Sequence[int], resumed: Sequence[bool]
) -> Tensor:
    """The delta rule over requests with these token rows, in float64."""
    out = torch.zeros(bounds[-1], HEADS, layer.kind.V, dtype=torch.float64)
    ops = [ComposeOp(lo, hi - lo, -1, Mode.NONE) for lo, hi in itertools.pairwise(bounds)]
    rows = [ComposeRow(i, int(r), i, i + 1) for i, r in enumerate(resumed)]
    records = DevicePool(geometry(layer.kind, slots=1), CPU).linear[NAME]
    program = pack(rows, ComposeRow), pack(ops, ComposeOp)
    reference.gdn_compose(x, layer.kind.weights(layer), caches, out, records, *program)
    return out


def geometry(kind: Kind, slots: int) -> PoolGeometry:
    """Of two layers: on a device their transition blocks stand side by side in one table."""
    linear = [
        LinearGeometry(name, HEADS, K, kind.V, TAPS - 1, kind.channels, torch.float32)
        for name in ("before", NAME)
    ]
    return PoolGeometry((), tuple(linear), page_tokens=8, pages=0, slots=slots, transition_blocks=BLOCKS)


BLOCKS = 4 * 2 * HEADS


ALL = ((5, 1), (9, 1), (3, 20), (2, 11), (0, 6))
"""Of each request: tokens behind it, tokens in this pass; decodes first, as vLLM orders a batch."""
DECODES = ((5, 1), (9, 1), (3, 8), (2, 11))
"""Nothing is left to stock code but decodes: the composed request stays before the next block boundary."""
DRAFTS = 2
DRAFTED = ((5, 3), (9, 1), *ALL[2:])
"""The decodes have two drafts, and none."""
DRAFTED_ALONE = ((5, 3), (9, 1), *DECODES[2:])
TABLE = torch.tensor([[4, 3, 6], [1, 8, 0]], dtype=torch.int32)
"""Slots of requests that may decode with drafts."""
ACCEPTED = torch.tensor([2, 1], dtype=torch.int32)


class World:
    """One layer and a batch: two decodes, a composed prefill that passes a block boundary, a segment request
    whose interior ends, a plain prefill, and poisoned padding.

    ``drafts``: as in an engine with so many at most, in which the decodes have some.
    """

    def __init__(self, kind: Kind, lengths: Sequence[tuple[int, int]] = ALL, drafts: int = 0) -> None:
        self.kind, self.drafts = kind, drafts
        gen = torch.Generator().manual_seed(3)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        layer: Any = kind.ours.__new__(kind.ours)
        nn.Module.__init__(layer)
        layer.prefix, layer.tp_size, layer.num_k_heads, layer.num_v_heads = NAME, 1, kind.key_heads, HEADS
        layer.kind = kind
        layer.cache_config = SimpleNamespace(block_size=BLOCK)
        layer.conv1d = nn.Module()
        layer.conv1d.weight = nn.Parameter(0.5 * normal(kind.channels, 1, TAPS))
        layer.conv1d.bias = None
        layer.A_log = nn.Parameter(torch.log(1 + torch.rand(HEADS, generator=gen)))
        layer.dt_bias = nn.Parameter(normal(*kind.gates).flatten() - 3)
        layer.head_k_dim, layer.head_v_dim = K, kind.V
        layer.stock_rows = 0
        kind.complete(layer)
        self.layer = layer

        self.lengths = lengths
        computed, scheduled = (np.array(part) for part in zip(*self.lengths, strict=True))
        self.starts = [0, *np.cumsum(scheduled).tolist()]
        self.slots = torch.tensor([4, 1, 7, 2, 5][: len(lengths)], dtype=torch.int32)
        tokens = self.starts[-1]
        self.tokens = tokens

        def rows(*width: int) -> Tensor:
            whole = torch.full((tokens + 2, *width), math.nan)
            whole[:tokens] = normal(tokens, *width)
            return whole

        # As vLLM's projection gives it: a part of wider rows.
        self.mixed = torch.cat([rows(kind.channels), rows(8)], dim=1)[:, : kind.channels]
        self.a, self.b = kind.projected(rows(*kind.gates), rows(HEADS))
        conv, state = (
            torch.full((9, TAPS - 1 + drafts, kind.channels), math.nan),
            torch.full((9, HEADS, kind.V, K), math.nan),
        )
        for (s0, _), slot in zip(self.lengths, self.slots.tolist(), strict=True):
            if s0:
                conv[slot, : TAPS - 1] = normal(TAPS - 1, kind.channels)
                state[slot] = normal(HEADS, kind.V, K)
        if drafts:
            # Two were accepted: what is behind the second is in another slot, and one row further on.
            conv[4, TAPS - 1] = normal(kind.channels)
            state[4], state[3] = math.nan, normal(HEADS, kind.V, K)
        layer.kv_cache = (conv, state)

        self.pool = DevicePool(geometry(kind, slots=4), CPU)
        records = self.pool.linear[NAME]
        records.state.fill_(math.nan), records.conv_tail.fill_(math.nan), records.transitions.fill_(math.nan)
        for slot in (0, 1):
            self.pool.transition_blocks.offer(slot)
            records.state[slot], records.conv_tail[slot] = (
                normal(HEADS, K, kind.V),
                normal(TAPS - 1, kind.channels),
            )
            records.transitions[records.block_of[slot].long()] = (0.1 * normal(HEADS, K, K)).half()
        # So that the captured record's transition blocks are not those that come next.
        self.pool.transition_blocks.offer(3)
        self.runtime = HypicRuntime(self.pool, dead_transition=2.0**-25)

        points = (ComposePoint(5, 0, 4, False), ComposePoint(9, 1, 4, False))
        plan = StreamPlan(np.arange(23), 23, points, np.arange(8), np.arange(8), use_transition=True)
        capture = CapturePlan(4, 12, 2, np.arange(8), None, leading=False)
        at = [
            BatchRow(i, self.starts[i], self.starts[i + 1], s0, s0 + n)
            for i, (s0, n) in enumerate(self.lengths)
        ]
        self.step = StepContext(
            [composed_row(at[2], StreamTensors.of(plan, CPU))],
            [capture_row("segment", at[3], capture)],
            CPU,
            Batch.of(computed, scheduled),
        )
        layer.connect(self.runtime)
        self.metadata = GDNAttentionMetadata(
            num_prefills=len(lengths) - 2,
            num_prefill_tokens=tokens - 2,
            num_decodes=2,
            num_decode_tokens=2,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=tokens,
            non_spec_query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            # A column of a block table.
            non_spec_state_indices_tensor=torch.stack([self.slots, self.slots * 0], 1)[:, 0],
        )
        if drafts:
            self.metadata = self.with_drafts(self.metadata)

    def with_drafts(self, plain: GDNAttentionMetadata) -> GDNAttentionMetadata:
        """As vLLM's builder describes the batch where its decodes have drafts."""
        count, starts = len(self.lengths), torch.tensor(self.starts, dtype=torch.int32)
        masks = torch.arange(count) < 2
        return replace(
            plain,
            num_prefill_tokens=self.tokens - self.starts[2],
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=2,
            num_spec_decode_tokens=self.starts[2],
            spec_query_start_loc=starts[:3],
            non_spec_query_start_loc=starts[2:] - starts[2],
            spec_state_indices_tensor=TABLE,
            non_spec_state_indices_tensor=torch.stack([self.slots, self.slots * 0], 1)[2:, 0],
            spec_sequence_masks=masks,
            spec_sequence_masks_cpu=masks,
            spec_token_indx=torch.arange(self.starts[2]),
            non_spec_token_indx=torch.arange(self.starts[2], self.tokens),
            num_accepted_tokens=ACCEPTED,
        )

    def run(self, step: StepContext | None) -> Tensor:
        """vLLM's operator, as the compiled graph calls it; the rows that count."""
        self.runtime.step = step
        core = torch.zeros(self.tokens + 2, HEADS, self.kind.V)
        context = ForwardContext(
            no_compile_layers={NAME: self.layer},
            attn_metadata={"before": self.metadata, NAME: self.metadata},
            slot_mapping={},
        )
        with override_forward_context(context):
            self.kind.call(self.layer, self.mixed, self.a, self.b, core)
        assert self.kind.norms or not core[self.tokens :].any(), "padding was written"
        return core[: self.tokens]

    def expected(self) -> tuple[Tensor, Caches, DevicePool]:
        """Everything in float64 by the references: outputs, caches, records.  Before :meth:`run`."""
        conv, state = self.layer.kv_cache
        caches = Caches(self.slots, conv[:, : TAPS - 1].clone(), state.transpose(2, 3).double().clone())
        if self.drafts:
            caches.conv[4], caches.state[4] = conv[4, 1:TAPS], caches.state[3]
        pool = DevicePool(geometry(self.kind, slots=4), CPU)
        mine, theirs = pool.linear[NAME], self.pool.linear[NAME]
        for name in ("state", "conv_tail", "transitions", "block_of"):
            getattr(mine, name).copy_(getattr(theirs, name))
        mine.block_of[2] = torch.arange(BLOCKS - HEADS, BLOCKS)  # nobody's
        records = SimpleNamespace(
            state=mine.state.double(),
            conv_tail=mine.conv_tail,
            transitions=mine.transitions.double(),
            block_of=mine.block_of,
        )
        out = torch.zeros(self.tokens, HEADS, self.kind.V, dtype=torch.float64)
        x, weights = Inputs(self.mixed, self.a, self.b), self.kind.weights(self.layer)
        # The composed request as one walk, whatever block boundary it passes.
        first, stop = self.starts[2], self.starts[3]
        ops = [
            ComposeOp(first, 2, 0, Mode.TRANSITION),
            ComposeOp(first + 2, 4, 1, Mode.TRANSITION),
            ComposeOp(first + 6, stop - first - 6, -1, Mode.NONE),
        ]
        rows = [ComposeRow(2, 1, 0, 3)]
        for i in (0, 1, 4)[: len(self.lengths) - 2]:
            rows.append(ComposeRow(i, int(self.lengths[i][0] > 0), len(ops), len(ops) + 1))
            ops.append(ComposeOp(self.starts[i], self.lengths[i][1], -1, Mode.NONE))
        program = pack(rows, ComposeRow), pack(ops, ComposeOp)
        reference.gdn_compose(x, weights, caches, out, records, *program)
        (segments,) = linear_step(self.step, BLOCK).segments
        reference.gdn_segments(x, weights, caches, out, records, segments.rows, [])
        self.records = records
        return self.kind.finished(out, self.mixed[: self.tokens].double()), caches, pool
