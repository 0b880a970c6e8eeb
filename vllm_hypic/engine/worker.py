"""Mixins for the workers and model runners of a hypic engine on all platforms.

The mixins precede vLLM's own classes.  vLLM's option ``worker_cls`` chooses the workers, without a patch.
The model runner's mixin does two things that need its inside.  The mixin rewrites positions once, at the
model's input, and tells the connector which batch row is which request.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from ..backends.ops import extension
from ..config.drafting import looks_drafts_up
from ..config.engine import config_of
from ..connector.multi_connector import own_connector, own_metadata
from ..connector.worker.connector import WorkerConnector
from ..pool.step import StepContext, rewritten_positions
from ..pool.upload import upload
from .drafter import ComposingDrafter, ComposingDraftModel, composing
from .whole_prompts import PromptTellingBuilder, WholePrompts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase
else:
    GPUModelRunner = WorkerBase = object

logger = init_logger("vllm.hypic.worker")

_NO_TOKENS = np.zeros(0, dtype=np.int64)


def worker_connector() -> WorkerConnector:
    """Return the worker half of this process's connector."""
    connector = own_connector(get_kv_transfer_group())
    assert connector is not None and connector.worker is not None
    return connector.worker


def current_step() -> StepContext | None:
    """Return the record work of the current pass; ``None`` without such work, or while the engine starts."""
    if not has_kv_transfer_group():
        return None
    runtime = worker_connector().runtime
    return None if runtime is None else runtime.step


class HypicModelRunner(GPUModelRunner):
    """Mixin for vLLM's V1 model runners: logical positions, and sampling that sees logical prompts."""

    _counted: SamplingMetadata | None = None
    input_batch: Any
    """vLLM's batch; while a proposer looks drafts up, :class:`.WholePrompts`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._looks_drafts_up = looks_drafts_up(self.vllm_config)
        if hasattr(self, "drafter"):
            self.drafter = composing(self)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if is_profiling:
            return
        from ..backends.attach import attach

        worker = worker_connector()
        found = attach(self, worker.geometry, worker.start)
        if isinstance(drafter := getattr(self, "drafter", None), ComposingDrafter):
            assert worker.runtime is not None
            drafter.runtime = worker.runtime
        config, geometry = config_of(self.vllm_config), worker.geometry
        self._log_operators()
        logger.info(
            "hypic: %s; link %s, seam windows of %d tokens, context %s, islands %s "
            "(reasons: docs/how-to/choose-for-my-model.md); pool of %.2f GiB = %s; %s",
            found,
            config.link,
            config.seam_tokens,
            config.context,
            config.islands,
            geometry.nbytes / 2**30,
            geometry.room,
            "eager" if self.compilation_config.mode == CompilationMode.NONE else "compiled",
        )

    def _log_operators(self) -> None:
        """Log which operators run on this platform."""
        raise NotImplementedError

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        metadata = own_metadata(scheduler_output.kv_connector_metadata)
        batch = self.input_batch
        step = worker_connector().begin_step(
            metadata, batch.req_ids, batch.num_computed_tokens_cpu[: batch.num_reqs], num_scheduled_tokens
        )
        if step is not None:
            self._rewrite_positions(step)
            self._count_segments()
        return prepared

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        batch = self.input_batch
        if not isinstance(batch.batch_update_builder, PromptTellingBuilder):
            batch.batch_update_builder = PromptTellingBuilder(batch.batch_update_builder, self._whole_prompts)
        # The metadata contain the whole prompts of new requests, which the batch update below reads.
        worker_connector().absorb(own_metadata(scheduler_output.kv_connector_metadata))
        return super()._update_states(scheduler_output)

    def _whole_prompts(self) -> dict[int, np.ndarray]:
        prompts = worker_connector().prompts.items()
        return {id(self.requests[r].prompt_token_ids): prompt for r, prompt in prompts if r in self.requests}

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Give a draft model the blocks and slots of the cache group that holds its layers.
        vLLM 0.32 always passes the first group's: K and V would overwrite other layers' KV, or states."""
        metadata, drafting = super()._build_attention_metadata(*args, **kwargs)
        drafter = getattr(self, "drafter", None)
        if drafting is not None and isinstance(drafter, ComposingDraftModel) and drafter.kv_cache_gid > 0:
            group, drafting = drafter.kv_cache_gid, copy(drafting)
            blocks = self.input_batch.block_table[group]
            drafting.block_table_tensor = blocks.get_device_tensor(drafting.num_reqs)
            drafting.slot_mapping = kwargs["slot_mappings"][group][: len(drafting.slot_mapping)]
        return metadata, drafting

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """Return the drafts for the next step."""
        runtime, batch = worker_connector().runtime, self.input_batch
        assert runtime is not None
        step = runtime.step
        if self._looks_drafts_up and (prompts := worker_connector().prompts):
            self.input_batch = WholePrompts.of(batch, [prompts.get(request) for request in batch.req_ids])
        try:
            return super().propose_draft_token_ids(*args, **kwargs)
        finally:
            self.input_batch, runtime.step = batch, step

    def _count_segments(self) -> None:
        """Add the prompt tokens outside the stream to the tokens that repetition penalties count."""
        batch = self.input_batch
        metadata = batch.sampling_metadata  # vLLM makes a new object when the batch changes
        if metadata.no_penalties or metadata is self._counted:
            return
        self._counted = metadata
        prompts = worker_connector().prompts
        read = [np.unique(prompts.get(request_id, _NO_TOKENS)) for request_id in batch.req_ids]
        if (most := max(map(len, read))) == 0:
            return
        more = np.full((len(read), most), batch.vocab_size)  # in vLLM, the id vocab_size means "no token"
        for row, tokens in zip(more, read, strict=True):
            row[: len(tokens)] = tokens
        seen = metadata.prompt_token_ids
        assert seen is not None
        metadata.prompt_token_ids = torch.cat([seen, *upload([more], seen.device)], dim=1)

    def _rewrite_positions(self, step: StepContext) -> None:
        """Write logical positions over stock ones in the model's persistent input buffers.
        Stock code has already computed the cache slots from its own positions."""
        if step.decoding is not None:
            rows = step.decoding.rows_on_device
            logical = self.positions.index_select(0, rows) + step.decoding.shifts
        elif (rewritten := rewritten_positions(step)) is None:
            return
        else:
            rows, logical = rewritten
        self.positions.index_copy_(0, rows, logical)
        if self.uses_mrope:
            # An image token has three different coordinates; all three need the same shift.
            whole: torch.Tensor = self.mrope_positions.gpu
            there = whole.index_select(1, rows)
            whole.index_copy_(1, rows, there + (logical - there[0]))


class HypicWorker(WorkerBase):
    """Mixin for vLLM's workers: registers the plugin's layers, and leaves memory for the pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if extension.missing() is None:
            extension.kernels().keep_frame_chunks()
        super().__init__(*args, **kwargs)

    @staticmethod
    def _register_layers() -> None:
        """Replace vLLM's layers by the plugin's layers, before the model is built."""
        from ..backends.linear.base import register_families
        from ..backends.rope import register_rope_taps
        from ..patches import block_copies, cpu_olmo_allocator, olmo_conv_loader

        block_copies.apply()
        cpu_olmo_allocator.apply()
        olmo_conv_loader.apply()
        register_families()
        register_rope_taps()

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available  # an explicit KV size stays; the pool's memory comes on top
        available -= self._scratch_bytes()
        config = config_of(self.vllm_config)
        if config.pool_bytes is not None:
            return available - config.pool_bytes
        return int(available * (1 - config.pool_fraction))

    def _scratch_bytes(self) -> int:
        """Return the bytes to leave free for allocations of the plugin's operators during a pass."""
        return 0

    def hypic_weights_changed(self) -> None:
        """Tell the layers that weights, and with them the scales of a quantised KV cache, may have changed.
        ``patches/engine_calls.py`` calls this method on every worker."""
        from ..backends.attention.base import PublicAttention
        from ..backends.linear.base import LinearLayer

        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            attention = getattr(layer, "impl", None)
            if isinstance(layer, LinearLayer):
                layer.weights_changed()
            elif isinstance(attention, PublicAttention) and attention.has_quantised_cache():
                attention.rescale(layer)

    def hypic_calls(self) -> dict[str, int]:
        """Return how often each of the plugin's operators ran; for ``collective_rpc``."""
        runtime = worker_connector().runtime
        return {} if runtime is None else dict(runtime.calls)
