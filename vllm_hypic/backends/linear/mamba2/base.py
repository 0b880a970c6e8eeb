"""Mamba2 under PIC (Nemotron-H, Granite 4, Falcon-H1, Zamba2): shared code of all platforms.

vLLM's custom operator looks the layer up by name and calls its ``conv_ssm_forward``.  So the compiled graph
is stock vLLM's, and the plugin replaces that method alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from ....pool.families import MAMBA2
from ....pool.runtime import HypicRuntime
from ....pool.tensors import DecayRecords
from ...ops import mamba2
from ..base import LinearLayer
from ..layout import Segments


@dataclass(frozen=True)
class ProjectedRows:
    """Token rows after the layer's projection: ``projected [rows, inner + channels + H]`` has a gate, the
    convolution's input, and a step size per head."""

    projected: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> ProjectedRows:
        """Return the rows ``tokens`` alone."""
        return ProjectedRows(self.projected[tokens])


class HypicMamba2(LinearLayer[ProjectedRows, mamba2.Carry], MambaMixer2):
    """vLLM's layer plus capture by ``mamba2_segments`` and composition by ``mamba2_compose``.

    Stock code applies gate, norm and output projection after the custom operator.
    """

    family = MAMBA2

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Run convolution and scan into ``output``, with the contract of the stock method."""
        if get_forward_context().attn_metadata is None:
            # In a profile run or a probe, stock code leaves uninitialised memory, which may be NaN.
            output.zero_()
        self.run(ProjectedRows(projected_states), output)

    def run_stock(self, x: ProjectedRows, out: torch.Tensor) -> None:
        MambaMixer2.conv_ssm_forward(self, x.projected, out)

    def by_head(self, x: ProjectedRows, out: torch.Tensor) -> tuple[mamba2.Inputs, torch.Tensor]:
        """Return the operators' inputs for ``x``, and ``out [rows, H * P]`` as ``[rows, H, P]``."""
        _, mixed, dt = x.projected.split(
            [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        return mamba2.Inputs(mixed, dt), out.view(len(out), -1, self.head_dim)

    def records(self, runtime: HypicRuntime) -> DecayRecords:
        return runtime.pool.records(self.prefix, DecayRecords)

    def cut(self, runtime: HypicRuntime, segments: Segments) -> list[mamba2.Carry]:
        """Return the carried data of the interiors that span passes."""
        state = self.records(runtime).state
        return self.carried(segments, lambda: mamba2.Carry.beside(state))

    def caches(self, slots: torch.Tensor) -> mamba2.Caches:
        """Return the layer's caches with ``slots`` by batch row."""
        conv, state = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # Stock code keeps the inputs of drafts after these rows.
        return mamba2.Caches(slots, conv[:, : self.conv_kernel_size - 1], state)

    def weights(self) -> mamba2.Weights:
        """Prepare the layer's constants for the operators."""
        groups = self.n_groups // self.tp_size
        return mamba2.Weights.prepare(
            self.conv_weights, self.conv1d.bias, self.A, self.dt_bias, self.D, groups
        )
