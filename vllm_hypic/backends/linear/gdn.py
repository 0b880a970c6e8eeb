"""Gated DeltaNet under PIC (Qwen3-Next, Qwen3.5 and their MoE forms).

The stock operator runs over the whole batch, unchanged.  Then, for the few rows that need more:

* a composed row with compose points in this chunk is run again from its old state, chunk by chunk,
  with ``S <- T_C S + S_C`` and the record's conv tail between chunks;
* an interior segment request is summed up to (T, S) from a zero state at the interior's start;
* a leading segment request's record is its ordinary end state.

Everything else (plain requests, decode, the bulk of segment requests) is stock code and stock bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from ..ops.gated_delta import seam_outputs, segment_summary
from .layout import Chunk, ComposedOps, LinearStep, linear_step

if TYPE_CHECKING:
    from ...connector.pool import LinearRecords
    from ...connector.runtime import HypicRuntime


class HypicGatedDeltaNet(QwenGatedDeltaNetAttention):
    """Stock layer plus capture and composition."""

    hypic_runtime: HypicRuntime | None = None
    """Set at start-up; ``None``: stock."""
    hypic_reached = False
    """Our operator ran: a compiled graph of stock vLLM, taken from a cache, would pass it by."""

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As stock, but for the core operator: opaque to the compiler, it looks at the step at run time."""
        mixed_qkv, z, b, a = self._project(hidden_states)
        core = torch.zeros(
            (hidden_states.size(0), self.num_v_heads // self.tp_size, self.head_v_dim),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        torch.ops.vllm.hypic_gdn_attention_core(mixed_qkv, b, a, core, _encode_layer_name(self.prefix))
        return self._output_projection(core, z)

    def core(self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor) -> None:
        """Recurrence of the whole batch into ``core [n, Hv, V]``, captured and composed as the step says."""
        self.hypic_reached = True
        name = _encode_layer_name(self.prefix)
        runtime = self.hypic_runtime
        if runtime is None or runtime.step is None:
            return cpu_gdn_attention_core(mixed_qkv, b, a, core, name)
        work = linear_step(runtime.step, self.conv_kernel_size - 1, self.cache_config.block_size)
        if work.empty:
            return cpu_gdn_attention_core(mixed_qkv, b, a, core, name)
        special = _SpecialRows(self, runtime, work, mixed_qkv, b, a)
        cpu_gdn_attention_core(mixed_qkv, b, a, core, name)
        special.finish(core)

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stock input projections: mixed qkv ``[n, conv_dim]``, z ``[n, Hv, V]``, b and a ``[n, Hv]``."""
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, ba)
            mixed_qkv = torch.cat([t.reshape(t.shape[0], -1) for t in (query, key, value)], dim=-1)
            return mixed_qkv, z, b, a
        qkv_size = (self.key_dim * 2 + self.value_dim) // self.tp_size
        mixed_qkv, z = mixed_qkvz.split([qkv_size, self.value_dim // self.tp_size], dim=-1)
        b, a = ba.chunk(2, dim=-1)
        return mixed_qkv, z.reshape(z.size(0), -1, self.head_v_dim), b, a

    def conv_weight(self) -> torch.Tensor:
        """Depthwise weights ``[conv_dim, k]``; vLLM packs its own copy in place on AVX512-BF16."""
        unpacked = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        weight = self.conv1d.weight if unpacked is None else unpacked
        return weight.view(weight.size(0), weight.size(-1))


def _hypic_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Custom operator: hands over to the layer."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.core(mixed_qkv, b, a, core_attn_out)


class _SpecialRows:
    """One layer's work on the special rows of one pass.

    Made before the stock operator runs (it overwrites the states it starts from), finished after.
    """

    def __init__(
        self,
        layer: HypicGatedDeltaNet,
        runtime: HypicRuntime,
        work: LinearStep,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
    ) -> None:
        self.layer, self.runtime, self.work = layer, runtime, work
        self.records: LinearRecords = runtime.pool.linear[layer.prefix]
        metadata = get_forward_context().attn_metadata[layer.prefix]
        self.slots = metadata.non_spec_state_indices_tensor.long()
        conv = layer.kv_cache[0]
        self.conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv  # [slots, k-1, dim]
        state = layer.kv_cache[1]
        # The CPU operator stores [Hv, K, V] in a buffer labelled [Hv, V, K].
        self.state = state.view(state.size(0), state.size(1), state.size(3), state.size(2))

        self.metadata = metadata
        self.sources = self._sources(mixed_qkv)
        self.mixed_qkv, self.b, self.a = mixed_qkv, b, a
        composed = torch.tensor([c.batch_row for c in work.composed], dtype=torch.int64, device=conv.device)
        self.composed_slots = self.slots[composed]
        self.before = self.state.index_select(0, self.composed_slots).float()

    def _sources(self, mixed_qkv: torch.Tensor) -> torch.Tensor:
        """Carried conv rows, record tails and token rows, as ``LinearStep`` numbers them."""
        carried = self.conv.index_select(0, self.slots[self.work.carried_rows])
        carried = torch.where(self.work.carried_resumed[:, None, None], carried, torch.zeros_like(carried))
        tails = self.records.conv_tail.index_select(0, self.work.tail_slots)
        dim = mixed_qkv.size(-1)
        return torch.cat([carried.reshape(-1, dim), tails.reshape(-1, dim), mixed_qkv])

    def finish(self, core: torch.Tensor) -> None:
        """Compose and capture; writes outputs and states of the special rows."""
        work = self.work
        if len(work.tokens):
            q, k, v = self._convolved()
            g, beta = self._gates()
            split = work.chunk_tokens
            if work.composed:
                self._compose(core, *(t[:split] for t in (q, k, v, g, beta)))
                if work.rest:
                    self._run_rest(core)
            if work.captures:
                self._capture(*(t[split:] for t in (k, v, g, beta)))
        for capture in work.leading_ended:
            self.runtime.calls["capture_linear"] += 1
            slot = self.slots[capture.row.index]
            self.records.state[capture.plan.slot] = self.state[slot].float()
            self.records.conv_tail[capture.plan.slot] = self.conv[slot]

    def _convolved(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k ``[n, Hk, K]`` and v ``[n, Hv, V]`` of the packed tokens."""
        layer = self.layer
        extended = self.sources.index_select(0, self.work.extended)
        mixed = _causal_conv(extended, layer.conv_weight(), layer.conv1d.bias).index_select(
            0, self.work.outputs
        )
        key_dim, value_dim = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
        q, k, v = mixed.split([key_dim, key_dim, value_dim], dim=-1)
        heads = (-1, layer.head_k_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (-1, layer.head_v_dim))

    def _gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log decay g and write strength beta ``[n, Hv]`` float32 of the packed tokens."""
        layer, tokens = self.layer, self.work.tokens
        a, b = self.a.index_select(0, tokens).float(), self.b.index_select(0, tokens).float()
        return -layer.A_log.float().exp() * F.softplus(a + layer.dt_bias.float()), torch.sigmoid(b)

    def _compose(
        self,
        core: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> None:
        """Start states of all chunks by composing summaries, then all outputs in one call."""
        self.runtime.calls["compose"] += 1
        work = self.work
        inner = work.inner_chunks[-1]
        transition, zero_start = segment_summary(
            k[:inner], v[:inner], g[:inner], beta[:inner], work.inner_chunks
        )
        starts = self.before.new_empty(len(work.chunks) - 1, *self.before.shape[1:])
        for row, before in zip(work.composed, self.before, strict=True):
            self._start_states(row, before, transition, zero_start, starts)
        out, states = seam_outputs(q, k, v, g, beta, work.chunks, starts)
        core.index_copy_(0, work.tokens[: work.chunk_tokens], out.to(core.dtype))
        ends = states[len(zero_start) :]  # one per composed row, in their order
        self.state.index_copy_(0, self.composed_slots, ends.to(self.state.dtype))
        self.conv.index_copy_(0, self.composed_slots, self.sources[work.conv_after].to(self.conv.dtype))

    def _run_rest(self, core: torch.Tensor) -> None:
        """Run stock code over the rows after the composed chunks, from the state they left."""
        rest = self.work.rest
        rows = torch.cat([torch.arange(r.first, r.stop, device=core.device) for r in rest])
        starts = torch.tensor([0, *accumulate(r.stop - r.first for r in rest)], dtype=torch.int32)
        batch_rows = torch.tensor([r.batch_row for r in rest], device=core.device)
        metadata = replace(
            self.metadata,
            num_prefills=len(rest),
            num_prefill_tokens=len(rows),
            num_decodes=0,
            num_decode_tokens=0,
            num_actual_tokens=len(rows),
            non_spec_query_start_loc=starts.to(core.device),
            non_spec_state_indices_tensor=self.metadata.non_spec_state_indices_tensor[batch_rows],
            has_initial_state=torch.ones(len(rest), dtype=torch.bool, device=core.device),
        )
        out = core.new_zeros(len(rows), *core.shape[1:])
        inputs = (t.index_select(0, rows) for t in (self.mixed_qkv, self.b, self.a))
        context = replace(get_forward_context(), attn_metadata={self.layer.prefix: metadata})
        with override_forward_context(context):
            cpu_gdn_attention_core(*inputs, out, _encode_layer_name(self.layer.prefix))
        core.index_copy_(0, rows, out)

    def _start_states(
        self,
        row: ComposedOps,
        before: torch.Tensor,
        transition: torch.Tensor,
        zero_start: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Fill in the start states of one request's chunks."""
        state = before if row.resumed else torch.zeros_like(before)
        for op in row.ops:
            if isinstance(op, Chunk):
                if op.last:
                    starts[len(zero_start) + op.index] = state
                else:
                    starts[op.index] = state
                    state = torch.baddbmm(zero_start[op.index], transition[op.index], state)
            elif op.replace_state:
                state = self.records.state[op.slot]
            elif op.use_transition:
                state = torch.baddbmm(
                    self.records.state[op.slot], self.records.transition[op.slot].float(), state
                )
            else:
                state = state + self.records.state[op.slot]

    def _capture(self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
        """Carry (T, S) of interiors on; store them where an interior ends."""
        self.runtime.calls["capture_linear"] += 1
        work, carry = self.work, self.runtime.carried_summaries
        heads, key_dim, value_dim = self.records.state.shape[1:]
        count = len(work.captures)
        initial_t = initial_s = None
        if not all(c.first for c in work.captures):
            initial_t = torch.eye(key_dim).expand(count, heads, -1, -1).contiguous()
            initial_s = torch.zeros(count, heads, key_dim, value_dim)
            for i, capture in enumerate(work.captures):
                if not capture.first:
                    initial_t[i], initial_s[i] = carry.pop((capture.request_id, self.layer.prefix))
        transition, state = segment_summary(k, v, g, beta, work.interiors, initial_t, initial_s)
        ended = 0
        for i, capture in enumerate(work.captures):
            if capture.last:
                slot = capture.plan.slot
                self.records.transition[slot] = transition[i]
                self.records.state[slot] = state[i]
                self.records.conv_tail[slot] = self.sources[work.capture_tails[ended]]
                ended += 1
            else:
                carry[(capture.request_id, self.layer.prefix)] = (transition[i].clone(), state[i].clone())


_CONV_BLOCK = 128
"""Rows per block: a block's float32 temporaries stay in the core's cache."""


def _causal_conv(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SiLU of the depthwise causal convolution of ``rows [n, dim]`` with ``weight [dim, k]``.

    Returns ``[n - k + 1, dim]`` in ``rows``' dtype: row i is the output at input row ``i + k - 1``.
    """
    taps = weight.t().float().contiguous()
    k = taps.size(0)
    out = rows.new_empty(rows.size(0) - k + 1, rows.size(1))
    for start in range(0, out.size(0), _CONV_BLOCK):
        block = rows[start : start + _CONV_BLOCK + k - 1].float()
        count = block.size(0) - k + 1
        total = block[:count] * taps[0]
        for tap in range(1, k):
            total.addcmul_(block[tap : tap + count], taps[tap])
        if bias is not None:
            total += bias.float()
        out[start : start + count] = F.silu(total, inplace=True)
    return out


def register_gdn() -> None:
    """Replace vLLM's GDN layer by ours.  May run any number of times."""
    from vllm.model_executor.custom_op import op_registry_oot

    if QwenGatedDeltaNetAttention.__name__ not in op_registry_oot:
        direct_register_custom_op(
            op_name="hypic_gdn_attention_core",
            op_func=_hypic_gdn_attention_core,
            mutates_args=["core_attn_out"],
        )
        name = QwenGatedDeltaNetAttention.name
        QwenGatedDeltaNetAttention.register_oot(HypicGatedDeltaNet)
        HypicGatedDeltaNet.name = name
