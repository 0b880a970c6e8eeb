"""The recurrence of plain rows, for layers whose recurrence vLLM has on GPUs alone.

A separate program runs plain requests as composed requests without records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context

from ....pool.states import TRANSITION_DTYPE
from ....pool.tensors import LinearRecords
from ...ops.gated_delta import GatedDeltaInputs
from ...ops.linear_layer.arguments import LayerCaches
from ...ops.program import ordinary
from .cpu import CPUDeltaNet

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


class OwnRecurrence(CPUDeltaNet):
    """Mixin before a layer of vLLM whose rows all run in our operators, with or without a pool."""

    l2_eps = 1e-6
    """Epsilon added to the squared norms of q and k in their normalisation, as in vLLM's kernels for these
    layers."""

    def run_stock(self, x: GatedDeltaInputs, out: torch.Tensor) -> None:
        by_layer = get_forward_context().attn_metadata
        if by_layer is None or (metadata := by_layer.get(self.prefix)) is None:
            return  # vLLM's profile run has no metadata
        views = self._current_views()
        caches = views.caches(metadata.non_spec_state_indices_tensor)
        views.ops.gdn_compose(
            x, views.weights, caches, out, _no_records(caches, x.mixed), *_program(metadata)
        )


def _no_records(caches: LayerCaches, inputs: torch.Tensor) -> LinearRecords:
    """Return the records of a pool without slots, for requests that read no record."""
    heads, K, V = caches.state.shape[1:]
    return LinearRecords(
        state=torch.empty(0, heads, K, V),
        conv_tail=inputs.new_empty(0, *caches.conv.shape[1:]),
        transitions=torch.empty(0, K, K, dtype=TRANSITION_DTYPE),
        block_of=torch.empty(0, heads, dtype=torch.int32),
    )


def _program(metadata: GDNAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and operations of a program that runs the whole batch."""
    requests: int = metadata.num_decodes + metadata.num_prefills
    starts: Any = metadata.non_spec_query_start_loc
    resumed = metadata.has_initial_state
    return ordinary(
        starts[: requests + 1].tolist(), [1] * requests if resumed is None else resumed[:requests].tolist()
    )
