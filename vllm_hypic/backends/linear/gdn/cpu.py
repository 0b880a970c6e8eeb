"""Gated DeltaNet under PIC on CPU: C++ operators, or PyTorch operators if C++ does not serve a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from ...ops import gated_delta
from ...ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights
from ...ops.linear_layer.arguments import LayerCaches
from ..drafted import Drafted
from ..layout import Composed, Segments, StockRows
from .base import DeltaNet, HypicGatedDeltaNet

if TYPE_CHECKING:
    from ....pool.runtime import HypicRuntime
    from ....pool.step import StepContext
    from ....pool.tensors import LinearRecords

_NO_DRAFTS = dict(
    num_spec_decodes=0,
    num_spec_decode_tokens=0,
    spec_query_start_loc=None,
    spec_state_indices_tensor=None,
    spec_sequence_masks=None,
    spec_sequence_masks_cpu=None,
    spec_token_indx=None,
    non_spec_token_indx=None,
    num_accepted_tokens=None,
)
"""The fields of vLLM's metadata for a batch without drafts."""


class CPUDeltaNet(DeltaNet):
    """Mixin before a layer of vLLM: capture and composition on CPU."""

    _views: _Views | None = None
    num_spec: int
    """Convolution inputs that vLLM's kernels keep for drafts; 0 here.  Each draft's state has a separate
    slot, as large as without drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = self.num_speculative_tokens = 0  # the attribute's names in vLLM's layers

    def run_segments(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        segments: Segments,
        x: GatedDeltaInputs,
        out: torch.Tensor,
    ) -> None:
        views = self._current_views()
        layer, carries = self._layer(views, runtime, x, out), self.cut(runtime, segments)
        views.ops.gdn_segments(*layer, segments.rows, carries, runtime.dead_transition)

    def run_composed(
        self,
        runtime: HypicRuntime,
        step: StepContext,
        composed: Composed,
        x: GatedDeltaInputs,
        out: torch.Tensor,
    ) -> None:
        views = self._current_views()
        views.ops.gdn_compose(*self._layer(views, runtime, x, out), composed.rows, composed.ops)

    def _layer(
        self, views: _Views, runtime: HypicRuntime, x: GatedDeltaInputs, core: torch.Tensor
    ) -> tuple[GatedDeltaInputs, GatedDeltaWeights, LayerCaches, torch.Tensor, LinearRecords]:
        metadata = get_forward_context().attn_metadata[self.prefix]
        caches = views.caches(metadata.non_spec_state_indices_tensor)
        return x, views.weights, caches, core, self.records(runtime)

    def sub_batch(
        self, step: StepContext, metadata: GDNAttentionMetadata, rows: StockRows
    ) -> GDNAttentionMetadata:
        slots = metadata.non_spec_state_indices_tensor
        return self.sub_batch_at(metadata, rows, slots[torch.tensor(rows.batch_rows, device=slots.device)])

    def sub_batch_at(
        self, metadata: GDNAttentionMetadata, rows: StockRows, slots: torch.Tensor
    ) -> GDNAttentionMetadata:
        decodes, tokens = rows.decodes, rows.starts[-1]
        return replace(
            metadata,
            num_decodes=decodes,
            num_decode_tokens=rows.starts[decodes],
            num_prefills=len(rows.batch_rows) - decodes,
            num_prefill_tokens=tokens - rows.starts[decodes],
            num_actual_tokens=tokens,
            non_spec_query_start_loc=torch.tensor(rows.starts, dtype=torch.int32, device=slots.device),
            non_spec_state_indices_tensor=slots,
            has_initial_state=torch.tensor(rows.resumed, dtype=torch.bool, device=slots.device),
            **_NO_DRAFTS,
        )

    def drafted(self, metadata: GDNAttentionMetadata) -> Drafted | None:
        if (decodes := metadata.spec_sequence_masks_cpu) is None:
            return None
        others = ~decodes
        lengths, resumed = torch.empty(len(decodes), dtype=torch.int64), torch.ones(len(decodes))
        slots = torch.empty(len(decodes), dtype=torch.int32)
        behind, accepted = metadata.spec_state_indices_tensor, metadata.num_accepted_tokens
        before = behind.gather(1, accepted[:, None].long() - 1).flatten()
        lengths[decodes] = metadata.spec_query_start_loc.diff().long()
        slots[decodes] = before
        if others.any():
            lengths[others] = metadata.non_spec_query_start_loc.diff().long()
            slots[others] = metadata.non_spec_state_indices_tensor
            resumed[others] = metadata.has_initial_state.float()
        starts = [0, *lengths.cumsum(0).tolist()]
        rows = decodes.nonzero().flatten().tolist()
        return Drafted(starts, resumed.bool().tolist(), slots, rows, behind, before)

    def kernel_refusal(self) -> str | None:
        """Return why the C++ operators do not serve this layer, or ``None``."""
        return self._current_views().refusal

    def weights_changed(self) -> None:
        self._views = None

    def _current_views(self) -> _Views:
        if self._views is None or self._views.of is not self.kv_cache[0]:
            self._views = _Views(self)
        return self._views

    def conv_weight(self) -> torch.Tensor:
        """Return the unpacked depthwise weights ``[conv_dim, k]``; vLLM packs its copy on AVX512-BF16."""
        unpacked: torch.Tensor | None = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        return super().conv_weight() if unpacked is None else unpacked


class HypicCPUGatedDeltaNet(CPUDeltaNet, HypicGatedDeltaNet):
    """vLLM's CPU layer of Qwen's models plus capture and composition."""

    def refusal(self) -> str | None:
        # Stock code checks the dtype only in the first plain request, and a failure there ends the engine.
        dtype = self.conv1d.weight.dtype
        if dtype == torch.bfloat16:
            return None
        return f"{dtype} (vLLM's CPU layer takes bfloat16 alone: use --dtype bfloat16)"

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the stock method with our custom operator as its core.  The operator is opaque to the compiler,
        so it can read the step at run time."""
        mixed_qkv, z, b, a = self._project(hidden_states)
        core = torch.zeros(
            (hidden_states.size(0), self.num_v_heads // self.tp_size, self.head_v_dim),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        torch.ops.vllm.hypic_gdn_attention_core(mixed_qkv, b, a, core, _encode_layer_name(self.prefix))
        return self._output_projection(core, z)

    def stock_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core: torch.Tensor
    ) -> None:
        by_layer = get_forward_context().attn_metadata
        if by_layer is not None:
            # With draft slots, the tensor is a column of a table; stock kernels need contiguous slots.
            metadata = by_layer[self.prefix]
            metadata.non_spec_state_indices_tensor = metadata.non_spec_state_indices_tensor.contiguous()
        cpu_gdn_attention_core(mixed_qkv, b, a, core, _encode_layer_name(self.prefix))

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return stock's projections: mixed qkv ``[n, conv_dim]``, z ``[n, Hv, V]``, b and a ``[n, Hv]``."""
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


class _Views:
    """A layer's constants and caches in the form of our operators, and the operators that serve the layer."""

    def __init__(self, layer: CPUDeltaNet) -> None:
        conv, state = layer.kv_cache
        self.of = conv
        self.conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv  # [slots, k-1, dim]
        # The CPU operator stores [Hv, K, V] in a buffer labelled [Hv, V, K].
        self.state = state.view(state.size(0), state.size(1), state.size(3), state.size(2))
        self.weights = layer.weights()
        nowhere = torch.zeros(0, dtype=torch.int32, device=conv.device)
        caches, inputs = self.caches(nowhere), layer.model_config.dtype
        self.ops = gated_delta.choose(self.weights, caches, inputs)
        self.refusal = gated_delta.refuses(self.weights, caches, inputs)

    def caches(self, slots: torch.Tensor) -> LayerCaches:
        return LayerCaches(slots.contiguous(), self.conv, self.state)


def _hypic_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Run the core of the named layer into ``core_attn_out``, as a custom operator."""
    layer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    layer.core(mixed_qkv, b, a, core_attn_out)


direct_register_custom_op(
    op_name="hypic_gdn_attention_core",
    op_func=_hypic_gdn_attention_core,
    mutates_args=["core_attn_out"],
)
