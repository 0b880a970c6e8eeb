"""States of requests that decode with drafts, where vLLM's prefix cache keeps those at the ends of blocks.

A pass may go beyond a block's end; the state that stood there is one of those behind its tokens, and becomes
the block's.  vLLM's kernel for it is for GPUs, and knows convolutions whose states are kept otherwise than
here (``backends/linear/drafted.py``).
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
        """What is behind a token is all in its slot."""
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
            # Tokens behind which the first of the pass's states stands, and the last block's end so far.
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
            if ended == running:  # the first slot has the state behind the last token now
                counts[i] = 1
        mamba_utils.do_mamba_copy_block(copies)
        self.input_batch.num_accepted_tokens_cpu[: len(counts)] = counts
