"""The CPU worker and model runner of a hypic engine.

Chosen through vLLM's own ``worker_cls``; a subclass, so nothing of vLLM is patched for it.  The model
runner does the two things that need its inside: it rewrites positions once, at the model's input, and
tells the connector which batch row is which request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from .connector.build import config_of
from .connector.connector import HypicConnector
from .connector.metadata import HypicMetadata
from .connector.worker_side import WorkerSide, logical_positions
from .patches import cpu_one_token_conv
from .patches.cpu_seeded_chunks import SeededChunks

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.hypic.worker")


class HypicCPUModelRunner(SeededChunks):
    """vLLM's CPU model runner with logical positions."""

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if is_profiling:
            return
        from .backends.attach import attach
        from .backends.ops import native

        worker = self._hypic()
        found = attach(self, worker.geometry, worker.start)
        config, geometry = config_of(self.vllm_config), worker.geometry
        (logger.warning if native.missing() else logger.info)("hypic: %s", native.describe())
        logger.info(
            "hypic: %s; link=%s, seam %d tokens; "
            "public pool %.2f GiB = %d pages x %d tokens + %d state slots; %s",
            found,
            config.link,
            config.seam_tokens,
            geometry.nbytes / 2**30,
            geometry.pages,
            geometry.page_tokens,
            geometry.slots,
            "eager" if self.compilation_config.mode == CompilationMode.NONE else "compiled",
        )

    @staticmethod
    def _hypic() -> WorkerSide:
        connector = get_kv_transfer_group()
        assert isinstance(connector, HypicConnector) and connector.worker is not None
        return connector.worker

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        metadata = scheduler_output.kv_connector_metadata
        assert isinstance(metadata, HypicMetadata)
        batch = self.input_batch
        step = self._hypic().begin_step(
            metadata, batch.req_ids, batch.num_computed_tokens_cpu[: batch.num_reqs], num_scheduled_tokens
        )
        if step is not None:
            for row, positions in logical_positions(step):
                logical = torch.from_numpy(positions)
                self.positions[row.q0 : row.q1] = logical
                if self.uses_mrope:
                    self.mrope_positions.gpu[:, row.q0 : row.q1] = logical
        return prepared


class HypicCPUWorker(CPUWorker):
    """vLLM's CPU worker with our layers, our model runner, and room left for the public pool."""

    def init_device(self) -> None:
        from .backends.linear.gdn import register_gdn
        from .backends.rope import register_rope_taps

        register_gdn()
        register_rope_taps()
        cpu_one_token_conv.apply()
        stock = cpu_worker.CPUModelRunner
        # init_device names the class as a module global; restored at once.
        cpu_worker.CPUModelRunner = HypicCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock
        if not isinstance(self.model_runner, HypicCPUModelRunner):
            raise RuntimeError(f"hypic needs vLLM's V1 model runner, got {type(self.model_runner).__name__}")

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available  # an explicit KV size is the user's; the pool comes beside it
        config = config_of(self.vllm_config)
        if config.pool_bytes is not None:
            return available - config.pool_bytes
        return int(available * (1 - config.pool_fraction))

    def hypic_calls(self) -> dict[str, int]:
        """How often each of our operators ran; for ``collective_rpc``."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, HypicConnector) and connector.worker is not None
        runtime = connector.worker.runtime
        return {} if runtime is None else dict(runtime.calls)
