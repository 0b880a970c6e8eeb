"""Speculative decoding by a draft model whose layers fill and read records as the served model's layers do.

vLLM's proposers derive both a token's rotation and its slot in vLLM's cache from the token's position.
For composed requests the rotation needs the logical position, and the slot needs the index in the stream.
The proposers therefore get stream indices, and this module rewrites the positions that the model reads.
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
    """Mixin that precedes vLLM's proposers which run a draft model."""

    positions: torch.Tensor
    uses_mrope: bool
    mrope_positions: torch.Tensor
    """Three-dimensional positions (M-RoPE), which some models read in place of ``positions``."""
    max_model_len: int
    net_num_new_slots_per_request: int
    vllm_config: VllmConfig
    speculative_config: Any
    _draft_attn_layer_names: set[str]

    runtime: HypicRuntime
    """The worker's runtime, set once the pool exists.  The proposer's caller restores ``runtime.step``."""
    _step: StepContext | None = None
    """The served model's last pass; ``None`` if the pass had no composed or captured request."""
    _at: torch.Tensor
    """Stream index ``[requests]`` of each request's token in the draft pass that was last set up."""

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Raise :class:`ConfigError` for a draft model whose layers lie in several groups of vLLM's cache.
        vLLM itself would end the engine.  Beside linear layers, vLLM gives all cache groups the same number
        of layers, and spreads the draft model's layers over the groups."""
        layers = self._draft_attn_layer_names
        groups = [g for g in kv_cache_config.kv_cache_groups if not layers.isdisjoint(g.layer_names)]
        if len(groups) > 1:
            speculative = self.speculative_config
            raise ConfigError(
                f"speculative decoding by {speculative.method!r}: the {len(layers)} attention layers of "
                f"{speculative.model} lie in {len(groups)} KV cache groups, but vLLM drafts from one group "
                "only: expected a draft model with fewer layers (one layer always fits), or one of the "
                f"methods {', '.join(LOOKED_UP)}"
            )
        self._refuse_passes_without_room(kv_cache_config.has_mamba_layers)
        super().validate_same_kv_cache_group(kv_cache_config)  # type: ignore[misc]

    def _refuse_passes_without_room(self, keeps_states: bool) -> None:
        """Raise :class:`ConfigError` if a pass cannot hold a block of states and the slots for drafts.
        vLLM ends a prompt's passes at blocks of states, and reserves slots of each pass for a draft model.
        If no block fits beside these slots, vLLM waits for ever."""
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
        """Set up the first draft pass: the rows of the model's pass, with at most one more per request."""
        self._step = step = self.runtime.step
        if step is None:
            return super().set_inputs_first_pass(target_positions=target_positions, **kwargs)  # type: ignore[misc]
        first = over_the_same(step, self.net_num_new_slots_per_request)
        if self.uses_mrope:
            # Only the draft model reads these positions: vLLM takes cache slots from the served model's pass.
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
        """Set up each further draft pass, which has one token of each request."""
        stock: Any = super()._update_positions_dependent_metadata  # type: ignore[misc]
        if self._step is None:
            found: torch.Tensor = stock(positions, common_attn_metadata, batch_size, *args)
            return found
        if self.uses_mrope:
            # Drafts are text, so all three coordinates grow by one, from any offset that images left.
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
            # vLLM discards drafts beyond the model's last position, so their clamped positions do no harm.
            self.positions.index_copy_(0, rows, logical.clamp(max=self.max_model_len - 1))


class ComposingDraftModel(ComposingDrafter, DraftModelProposer):
    """Proposer with a draft model separate from the served model."""

    kv_cache_gid: int
    """Group of vLLM's cache that holds the draft model's layers."""


class ComposingHead(ComposingDrafter, EagleProposer):
    """Proposer with a head on the model's hidden states (EAGLE), which reads each token with its successor.

    vLLM takes the successor from the pass.  The prompt has a different successor before a compose point, at
    a record's end and at a chunk's end.  A record without a seam behind it has another successor in each
    prompt.  The record's last row then keeps the token generated after the segment, and drafts get worse.
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
    """Return the composing proposer that replaces ``runner``'s, or ``runner``'s own if none replaces it.
    The call comes before any weights are read."""
    ours = COMPOSING.get(type(runner.drafter))
    return runner.drafter if ours is None else ours(runner.vllm_config, runner.device, runner)
