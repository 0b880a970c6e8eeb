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
from ...ops.linear_layer.arguments import LayerCaches
from ...ops.mamba2 import Mamba2Carry, Mamba2Inputs, Mamba2Weights
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


class HypicMamba2(LinearLayer[ProjectedRows, Mamba2Carry], MambaMixer2):
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

    def by_head(self, x: ProjectedRows, out: torch.Tensor) -> tuple[Mamba2Inputs, torch.Tensor]:
        """Return the operators' inputs for ``x``, and ``out [rows, H * P]`` as ``[rows, H, P]``."""
        _, mixed, dt = x.projected.split(
            [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        return Mamba2Inputs(mixed, dt), out.view(len(out), -1, self.head_dim)

    def records(self, runtime: HypicRuntime) -> DecayRecords:
        return runtime.pool.records(self.prefix, DecayRecords)

    def cut(self, runtime: HypicRuntime, segments: Segments) -> list[Mamba2Carry]:
        """Return the carried data of the interiors that span passes."""
        state = self.records(runtime).state
        return self.carried(segments, lambda: Mamba2Carry.beside(state))

    def caches(self, slots: torch.Tensor) -> LayerCaches:
        """Return the layer's caches with ``slots`` by batch row."""
        conv, state = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # Stock code keeps the inputs of drafts after these rows.
        return LayerCaches(slots, conv[:, : self.conv_kernel_size - 1], state)

    def weights(self) -> Mamba2Weights:
        """Prepare the layer's constants for the operators."""
        groups = self.n_groups // self.tp_size
        return Mamba2Weights.prepare(
            self.conv_weights, self.conv1d.bias, self.A, self.dt_bias, self.D, groups
        )
