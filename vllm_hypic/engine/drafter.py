"""Speculative decoding by a model that drafts: its layers fill and read records as the model's own do.

vLLM's proposers work out from a token's position both how it is rotated and where it lies in vLLM's cache.
For composed requests the one is logical, the other an index in the stream: they are given indices, and
positions are rewritten where the drafting model reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from ..config.drafting import LOOKED_UP
from ..errors import ConfigError
from ..pool.draft_steps import of_one_token, over_the_same, successors
from ..pool.step import StepContext, rewritten_positions
from ..pool.upload import upload

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..pool.runtime import HypicRuntime


class ComposingDrafter:
    """Mixin before vLLM's proposers that run a model."""

    positions: torch.Tensor
    uses_mrope: bool
    mrope_positions: torch.Tensor
    """What a model with three-dimensional positions (M-RoPE) reads in place of ``positions``."""
    max_model_len: int
    net_num_new_slots_per_request: int
    vllm_config: VllmConfig
    speculative_config: Any
    _draft_attn_layer_names: set[str]

    runtime: HypicRuntime
    """Set once records can be read.  Whoever has this propose puts the step back that was there before."""
    _step: StepContext | None = None
    """The model's pass that the drafts follow; ``None``: no request of ours was in it."""
    _at: torch.Tensor
    """Stream index of each request's token in the pass that was last set up."""

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Refuse what vLLM would end the engine for.  Beside linear layers all groups of its cache have as
        many layers, and those of a draft model are dealt out to them."""
        layers = self._draft_attn_layer_names
        groups = [g for g in kv_cache_config.kv_cache_groups if not layers.isdisjoint(g.layer_names)]
        if len(groups) > 1:
            speculative = self.speculative_config
            raise ConfigError(
                f"speculative decoding by {speculative.method!r}: vLLM spreads the {len(layers)} attention "
                f"layers of the draft model {speculative.model} over {len(groups)} groups of its cache, but "
                "drafts from one group only: expected a draft model of fewer layers (one layer always fits), "
                f"or a method of {', '.join(LOOKED_UP)}"
            )
        self._refuse_passes_without_room(kv_cache_config.has_mamba_layers)
        super().validate_same_kv_cache_group(kv_cache_config)  # type: ignore[misc]

    def _refuse_passes_without_room(self, keeps_states: bool) -> None:
        """vLLM ends a prompt's passes at blocks of states, and sets slots of each pass aside for a
        draft model: where no block fits beside them it waits for ever."""
        cache, passes = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        aside = self.speculative_config.max_num_new_slots_for_drafting
        most, block = passes.max_num_batched_tokens, cache.block_size
        if keeps_states and cache.mamba_cache_mode == "align" and most - aside < block:
            raise ConfigError(
                f"max_num_batched_tokens={most}: with a prefix cache, a pass must hold a block of states "
                f"({block} tokens) and the slots that vLLM reserves for drafts by "
                f"{self.speculative_config.method!r} ({aside}): expected {block + aside} or more, "
                "or --no-enable-prefix-caching"
            )

    def set_inputs_first_pass(self, *, target_positions: torch.Tensor, **kwargs: Any) -> Any:
        """Drafting begins with the rows of the model's pass, and may have one more of each request."""
        self._step = step = self.runtime.step
        if step is None:
            return super().set_inputs_first_pass(target_positions=target_positions, **kwargs)  # type: ignore[misc]
        first = over_the_same(step, self.net_num_new_slots_per_request)
        if self.uses_mrope:
            # Only the model reads them: vLLM takes the slots in its cache from the model's pass.
            found = super().set_inputs_first_pass(target_positions=target_positions, **kwargs)  # type: ignore[misc]
            starts, computed = map(np.array, (first.batch.starts[:-1], first.batch.computed))
            [before] = upload([computed - starts], step.device)
            self._at = before + found[1]
        else:
            indices = target_positions.clone()
            for row in [*(c.row for c in step.composed), *(c.row for c in step.captures)]:
                indices[row.q0 : row.q1] = torch.arange(row.s0, row.s1, device=indices.device)
            found = super().set_inputs_first_pass(target_positions=indices, **kwargs)  # type: ignore[misc]
            self._at = self.positions[found[1]].clone()
        self._begin(first)
        return found

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, common_attn_metadata: Any, batch_size: int, *args: Any
    ) -> torch.Tensor:
        """Each further pass has one token of each request."""
        stock: Any = super()._update_positions_dependent_metadata  # type: ignore[misc]
        if self._step is None:
            found: torch.Tensor = stock(positions, common_attn_metadata, batch_size, *args)
            return found
        if self.uses_mrope:
            # Drafts are text, of which all coordinates grow alike, wherever images moved them to.
            seen = (positions + 1).clamp(max=self.max_model_len - 1)
            at = stock(self._at.expand(len(positions), -1), common_attn_metadata, batch_size, *args)
            self._at = at[0].clone()
            self._begin(of_one_token(self._step, self._at.tolist()))
            return at.copy_(seen)
        self._at = stock(self._at, common_attn_metadata, batch_size, *args).clone()
        self._begin(of_one_token(self._step, self._at.tolist()))
        return self.positions[:batch_size]

    def _begin(self, step: StepContext) -> None:
        self.runtime.step = step
        if not self.uses_mrope and (rewritten := rewritten_positions(step)) is not None:
            rows, logical = rewritten
            # What is beyond the model's positions is no draft that counts.
            self.positions.index_copy_(0, rows, logical.clamp(max=self.max_model_len - 1))


class ComposingDraftModel(ComposingDrafter, DraftModelProposer):
    """A model of its own."""

    kv_cache_gid: int
    """Group of vLLM's cache that has its layers."""


class ComposingHead(ComposingDrafter, EagleProposer):
    """A head on the model's hidden states (EAGLE), which reads with each token its successor.

    vLLM finds that in the pass.  The prompt has another before a compose point, at the end of a record and
    where a chunk ends.  A record that has no seam behind it is followed by another token in each prompt: its
    last row has what was generated there, and guesses worse.
    """

    input_ids: torch.Tensor

    def __init__(self, config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(config, device, runner)
        self._runner = runner

    def set_inputs_first_pass(self, **kwargs: Any) -> Any:
        found = super().set_inputs_first_pass(**kwargs)
        if self._step is not None:
            batch = self._runner.input_batch
            others = successors(self._step, batch.token_ids_cpu, batch.num_tokens_no_spec)
            if others is not None:
                rows, tokens = others
                self.input_ids.index_copy_(0, rows, tokens.to(self.input_ids.dtype))
        return found


COMPOSING = {DraftModelProposer: ComposingDraftModel, EagleProposer: ComposingHead}


def composing(runner: Any) -> Any:
    """The proposer for ``runner`` in place of the one that vLLM gave it; no weights are read yet."""
    ours = COMPOSING.get(type(runner.drafter))
    return runner.drafter if ours is None else ours(runner.vllm_config, runner.device, runner)
