"""Gated DeltaNet under PIC (Qwen3-Next, Qwen3.5 and their MoE forms).

* Segment requests go through ``gdn_segments``: outputs, running state and the record in one scan.
* Composed requests with compose points in this pass go through ``gdn_compose``, up to the first block
  boundary after the last point.
* All else (plain requests, decode, what composed requests run after that boundary) is stock code over these
  rows only: stock bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from ..ops import gated_delta
from .layout import LinearStep, Segments, StockRows, linear_step, stock_rows

if TYPE_CHECKING:
    from ...connector.runtime import HypicRuntime


class HypicGatedDeltaNet(QwenGatedDeltaNetAttention):
    """Stock layer plus capture and composition."""

    hypic_runtime: HypicRuntime | None = None
    """Set at start-up; ``None``: stock."""
    hypic_reached = False
    """Our operator ran: a compiled graph of stock vLLM, taken from a cache, would pass it by."""
    _views: _Views | None = None

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
        work = linear_step(runtime.step, self.cache_config.block_size)
        if work.empty:
            return cpu_gdn_attention_core(mixed_qkv, b, a, core, name)
        self._special(runtime, work, gated_delta.Inputs(mixed_qkv, a, b), core)
        # After ours: it goes on from the states that they left.
        stock = _stock_context(runtime, work, self.prefix)
        if stock is not None:
            rows, context = stock
            inputs = (t[rows.tokens] for t in (mixed_qkv, b, a))
            out = core[rows.tokens]
            with override_forward_context(context):
                cpu_gdn_attention_core(*inputs, out, name)
            if not isinstance(rows.tokens, slice):
                core.index_copy_(0, rows.tokens, out)

    def _special(
        self, runtime: HypicRuntime, work: LinearStep, x: gated_delta.Inputs, core: torch.Tensor
    ) -> None:
        """The rows that our operators run."""
        views, records = self._current_views(), runtime.pool.linear[self.prefix]
        metadata = get_forward_context().attn_metadata[self.prefix]
        layer = x, views.weights, views.caches(metadata.non_spec_state_indices_tensor), core, records
        if work.segments is not None:
            runtime.calls["capture_linear"] += 1
            if work.segments.ended:
                records.held.offer(list(work.segments.ended))
            carries = self._carries(runtime, work.segments)
            views.ops.gdn_segments(*layer, work.segments.rows, carries, runtime.dead_transition)
        if work.composed is not None:
            runtime.calls["compose"] += 1
            views.ops.gdn_compose(*layer, work.composed.rows, work.composed.ops)

    def kernel_refusal(self) -> str | None:
        """Why the C++ operators do not serve this layer, or ``None``.  Its caches must be allocated."""
        return self._current_views().refusal

    def _current_views(self) -> _Views:
        if self._views is None or self._views.of is not self.kv_cache[0]:
            self._views = _Views(self)
        return self._views

    def _carries(self, runtime: HypicRuntime, segments: Segments) -> list[gated_delta.Carry]:
        """What the interiors that are cut here carry, written by this pass or an earlier one."""
        kept, state = runtime.carried_summaries, runtime.pool.linear[self.prefix].state
        for request, starts in zip(segments.carried, segments.starting, strict=True):
            if starts:
                kept[request, self.prefix] = gated_delta.Carry.beside(state)
        return [kept[request, self.prefix] for request in segments.carried]

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


class _Views:
    """A layer's constants and caches as our operators take them, and the operators that serve it."""

    def __init__(self, layer: HypicGatedDeltaNet) -> None:
        conv, state = layer.kv_cache
        self.of = conv
        self.conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv  # [slots, k-1, dim]
        # The CPU operator stores [Hv, K, V] in a buffer labelled [Hv, V, K].
        self.state = state.view(state.size(0), state.size(1), state.size(3), state.size(2))
        self.weights = gated_delta.Weights.prepare(
            layer.conv_weight(),
            layer.conv1d.bias,
            layer.A_log,
            layer.dt_bias,
            layer.num_k_heads // layer.tp_size,
            gated_delta.l2_eps(conv.device),
        )
        nowhere = torch.zeros(0, dtype=torch.int32, device=conv.device)
        self.ops = gated_delta.choose(self.weights, self.caches(nowhere))
        self.refusal = gated_delta.refuses(self.weights, self.caches(nowhere))

    def caches(self, slots: torch.Tensor) -> gated_delta.Caches:
        return gated_delta.Caches(slots, self.conv, self.state)


def _stock_context(
    runtime: HypicRuntime, work: LinearStep, layer: str
) -> tuple[StockRows, ForwardContext] | None:
    """The rows that stock code runs, and a forward context that holds only them; made once per pass."""
    assert runtime.step is not None
    cache = runtime.step.cache
    if "linear:stock" not in cache:
        context = get_forward_context()
        whole = context.attn_metadata
        batch = whole[layer]
        requests = batch.num_decodes + batch.num_prefills
        resumed = batch.has_initial_state
        rows = stock_rows(
            work,
            batch.non_spec_query_start_loc[: requests + 1].tolist(),
            [True] * requests if resumed is None else resumed[:requests].tolist(),
            batch.num_decodes,
        )
        if rows is not None:
            # Layers of one group share their metadata, and so the sub-batch's.
            parts = {id(whole[name]): whole[name] for name in runtime.pool.linear}
            subs = {key: _sub_batch(metadata, rows) for key, metadata in parts.items()}
            own = {name: subs[id(whole[name])] for name in runtime.pool.linear}
            cache["linear:stock"] = rows, replace(context, attn_metadata=own)
        else:
            cache["linear:stock"] = None
    found: Any = cache["linear:stock"]
    return found


def _sub_batch(metadata: GDNAttentionMetadata, rows: StockRows) -> GDNAttentionMetadata:
    device = metadata.non_spec_state_indices_tensor.device
    starts = torch.tensor(rows.starts, dtype=torch.int32, device=device)
    decodes, tokens = rows.decodes, rows.starts[-1]
    return replace(
        metadata,
        num_decodes=decodes,
        num_decode_tokens=rows.starts[decodes],
        num_prefills=len(rows.batch_rows) - decodes,
        num_prefill_tokens=tokens - rows.starts[decodes],
        num_actual_tokens=tokens,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=metadata.non_spec_state_indices_tensor[
            torch.tensor(rows.batch_rows, device=device)
        ],
        has_initial_state=torch.tensor(rows.resumed, dtype=torch.bool, device=device),
    )


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
