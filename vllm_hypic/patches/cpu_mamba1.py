"""Patch: Mamba1 models (Jamba, Mamba, Falcon-Mamba) run on CPU.

Target: in ``vllm.model_executor.layers.mamba.mamba_mixer``, ``selective_scan_fn``, ``selective_state_update``
and ``MambaMixer.forward_impl``.
Why: the scan has only a CUDA kernel, and vLLM's decode update for CPU is Mamba2's, wrong for Mamba1's shapes.
The patch replaces both by the scan that composes records, over rows without records.  The layer also gives
its projections strided rows, which matrix products on CPU refuse.  The layer makes rows contiguous only for
LoRA, and with the patch always.  On CPUs with AVX512-BF16, vLLM packs bfloat16 weights of a convolution of
width 4 for another operator; the patch restores the unpacked weights.
Until: vLLM has such operators for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backends.ops import mamba1
from ..backends.ops.linear_layer.arguments import StateCaches
from ..backends.ops.mamba1 import Mamba1Inputs, Mamba1Weights
from ..backends.ops.program import ordinary
from ..pool.tensors import DiagonalRecords
from .signature import replaces, require_parameters


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba import mamba_mixer

    require_parameters(mamba_mixer.selective_scan_fn, "u", "ssm_states", "delta", "A", "B", "C", "D", "z")
    require_parameters(
        mamba_mixer.selective_state_update, "state", "x", "dt", "A", "B", "C", "D", "dt_bias", "z"
    )
    mamba_mixer.selective_scan_fn = _selective_scan
    mamba_mixer.selective_state_update = _selective_state_update

    @replaces(mamba_mixer.MambaMixer, mamba_mixer.MambaMixer.forward_impl, "self", "hidden_states", "output")
    def forward_impl(stock: Any, self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        unpacked = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        if unpacked is not None:
            self.conv1d.weight.data = unpacked.unsqueeze(1)
        if get_forward_context().attn_metadata is None:
            # In a profile run, stock code would leave uninitialised memory in the output.
            output.zero_()
            return
        self.is_lora_enabled = True
        stock(self, hidden_states, output)


def _selective_scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    *,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Run a prefill: ``u, delta, z [channels, rows]``, ``B, C [N, rows]``; return ``[channels, rows]``."""
    out = torch.empty_like(u.t(), memory_format=torch.contiguous_format)
    inputs = Mamba1Inputs(u.t(), delta.t(), z.t(), B.t(), C.t())
    weights = Mamba1Weights.prepare(A, delta_bias, D)
    caches = StateCaches(cache_indices.int(), ssm_states)
    _scan(inputs, weights, caches, has_initial_state.tolist(), query_start_loc.tolist(), out)
    return out.t()


def _selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor,
    *,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Run a decode with one row per request into ``out``.
    Shapes: ``x, dt, z, out [rows, channels]``, ``B, C [rows, N]``."""
    inputs, weights = Mamba1Inputs(x, dt, z, B, C), Mamba1Weights.prepare(A, dt_bias, D)
    caches = StateCaches(state_batch_indices.int().flatten(), state)
    _scan(inputs, weights, caches, [True] * len(x), range(len(x) + 1), out)


def _scan(
    x: Mamba1Inputs,
    weights: Mamba1Weights,
    caches: StateCaches,
    resumed: Sequence[bool],
    ends: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Run the scan over requests of rows ``[ends[i], ends[i + 1])``, and write the results into ``out``."""
    run = mamba1.choose(x, caches).mamba1_compose
    run(x, weights, caches, out, _no_records(caches.state), *ordinary(ends, resumed))


def _no_records(state: torch.Tensor) -> DiagonalRecords:
    """Return the records of a pool without slots, for requests that read no record.
    ``state [slots, channels, N]`` is vLLM's cache; vLLM also runs the convolution."""
    empty = state.new_empty(0, *state.shape[1:], dtype=torch.float32)
    return DiagonalRecords(empty, conv_tail=empty.mT[:, :0], elapsed=empty[..., 0].contiguous())
