"""Keeps states at block ends in vLLM's prefix cache for requests that decode with drafts, on CPU.

A pass may go beyond a block's end.  The pass keeps a state behind each token, and the state at the block's
end becomes the block's state.  vLLM's kernel for this copy runs on GPUs only, and expects another layout of
convolution states than ``backends/linear/drafted.py`` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class KeptStates(CPUModelRunner):
    """Mixin over vLLM's CPU model runner."""

    _mamba_bufs: Any

    @property
    def _keeps_states(self) -> bool:
        drafts = self.speculative_config is not None and self.model_config.is_hybrid
        return drafts and self.cache_config.mamba_cache_mode == "align"

    def _get_mamba_state_copy_funcs(self) -> Any:
        """Return copy functions per kind of layer, which copy one slot: a slot holds the whole state."""
        stock: Any = super()._get_mamba_state_copy_funcs()
        if not self._keeps_states:
            return stock
        return {kind: (get_temporal_copy_spec,) * len(copied) for kind, copied in stock.items()}

    def _get_mamba_bufs(self) -> Any:
        if self._keeps_states and self._mamba_bufs is None:
            self._mamba_bufs = mamba_utils.MambaBuffers.create(
                max_num_reqs=self.max_num_reqs,
                kv_cache_config=self.kv_cache_config,
                copy_funcs=self._get_mamba_state_copy_funcs(),
                make_buffer=self._make_buffer,
                device=self.device,
                with_postprocess_align=False,
            )
        return super()._get_mamba_bufs()

    def _update_states_after_model_execute(
        self, output_token_ids: torch.Tensor, scheduler_output: SchedulerOutput
    ) -> None:
        if not self._keeps_states:
            return super()._update_states_after_model_execute(output_token_ids, scheduler_output)
        accepted = (output_token_ids != -1).sum(dim=1)
        copies = self._get_mamba_bufs().preprocess
        block, copies.offset = copies.mamba_spec.block_size, 0
        counts = accepted.tolist()
        self.num_accepted_tokens.gpu[: len(counts)] = accepted
        for i, (request_id, count) in enumerate(zip(self.input_batch.req_ids, counts, strict=True)):
            request, running = self.requests[request_id], self.mamba_state_idx[request_id]
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            # first: tokens up to the pass's first kept state; end: last block end among accepted tokens.
            first = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request_id] - drafts
            end = (first + count - 1) // block * block
            if end < first:
                continue
            ended = end // block - 1
            mamba_utils.collect_mamba_copy_meta(
                copies,
                self.kv_cache_config,
                self._get_mamba_state_copy_funcs(),
                copies.mamba_group_ids,
                running,
                ended,
                end - first,
                request,
                self.compilation_config.static_forward_context,
            )
            if ended == running:  # the copy puts the state behind the last token into the first slot
                counts[i] = 1
        mamba_utils.do_mamba_copy_block(copies)
        self.input_batch.num_accepted_tokens_cpu[: len(counts)] = counts
