"""Mamba2 under PIC (Nemotron-H, Granite 4, Falcon-H1, Zamba2): what all platforms share.

vLLM's custom operator looks the layer up by name and calls its ``conv_ssm_forward``, so the compiled graph is
stock vLLM's and only that method is ours.
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
    """Token rows behind the layer's projection: ``projected [rows, inner + channels + H]``, of a gate, what
    is convolved, and a step a head."""

    projected: torch.Tensor

    def part(self, tokens: slice | torch.Tensor) -> ProjectedRows:
        """These rows alone."""
        return ProjectedRows(self.projected[tokens])


class HypicMamba2(LinearLayer[ProjectedRows, mamba2.Carry], MambaMixer2):
    """Stock layer plus capture and composition: ``mamba2_segments`` and ``mamba2_compose``.

    Gate, norm and output projection come behind the operator, in stock code.
    """

    family = MAMBA2

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """Same contract as the stock method."""
        if get_forward_context().attn_metadata is None:
            # A profile run or a probe: stock code leaves what happens to stand there, which may be NaN.
            output.zero_()
        self.run(ProjectedRows(projected_states), output)

    def run_stock(self, x: ProjectedRows, out: torch.Tensor) -> None:
        MambaMixer2.conv_ssm_forward(self, x.projected, out)

    def by_head(self, x: ProjectedRows, out: torch.Tensor) -> tuple[mamba2.Inputs, torch.Tensor]:
        """What the operators take of token rows, and ``out [rows, H * P]`` as ``[rows, H, P]``."""
        _, mixed, dt = x.projected.split(
            [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        return mamba2.Inputs(mixed, dt), out.view(len(out), -1, self.head_dim)

    def records(self, runtime: HypicRuntime) -> DecayRecords:
        return runtime.pool.records(self.prefix, DecayRecords)

    def cut(self, runtime: HypicRuntime, segments: Segments) -> list[mamba2.Carry]:
        """What the interiors that are cut here carry."""
        state = self.records(runtime).state
        return self.carried(segments, lambda: mamba2.Carry.beside(state))

    def caches(self, slots: torch.Tensor) -> mamba2.Caches:
        """The layer's, with ``slots`` by batch row."""
        conv, state = self.kv_cache
        conv = conv.transpose(1, 2) if is_conv_state_dim_first() else conv
        # Behind these rows stock code keeps drafts.
        return mamba2.Caches(slots, conv[:, : self.conv_kernel_size - 1], state)

    def weights(self) -> mamba2.Weights:
        """The layer's constants as the operators take them, made anew."""
        groups = self.n_groups // self.tp_size
        return mamba2.Weights.prepare(
            self.conv_weights, self.conv1d.bias, self.A, self.dt_bias, self.D, groups
        )
