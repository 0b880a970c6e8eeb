"""The CPU worker and model runner of a hypic engine."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from ..patches import (
    cpu_bailing_norms,
    cpu_draft_sampling,
    cpu_kimi_model,
    cpu_mamba1,
    cpu_mamba2_checkpoints,
    cpu_mla_blocks,
    cpu_numba_threads,
    cpu_one_token_conv,
    cpu_rope_heads,
)
from ..patches.cpu_seeded_chunks import SeededChunks
from .kept_states import KeptStates
from .worker import HypicModelRunner, HypicWorker

logger = init_logger("vllm.hypic.worker")


class HypicCPUModelRunner(HypicModelRunner, KeptStates, SeededChunks):
    """vLLM's CPU model runner with logical positions."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        if not get_pp_group().is_first_rank:
            # vLLM makes these tensors in a warm-up pass and later asserts that they exist.  Eager engines
            # with an explicit cache size skip the warm-up pass.
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        super().initialize_kv_cache(*args, **kwargs)

    def _log_operators(self) -> None:
        from ..backends.ops import extension

        (logger.warning if extension.missing() else logger.info)("hypic: %s", extension.describe())


class HypicCPUWorker(HypicWorker, CPUWorker):
    """vLLM's CPU worker with the plugin's layers and model runner, and with memory left for the pool."""

    def init_device(self) -> None:
        self._register_layers()
        cpu_bailing_norms.apply()
        cpu_kimi_model.apply()
        cpu_mla_blocks.apply()
        cpu_mamba1.apply()
        cpu_mamba2_checkpoints.apply()
        cpu_draft_sampling.apply()
        cpu_numba_threads.apply()
        cpu_one_token_conv.apply()
        cpu_rope_heads.apply()
        stock = cpu_worker.CPUModelRunner
        # init_device reads the class from a module global, which is restored at once.
        cpu_worker.CPUModelRunner = HypicCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock
        if not isinstance(self.model_runner, HypicCPUModelRunner):
            raise RuntimeError(f"hypic needs vLLM's V1 model runner, got {type(self.model_runner).__name__}")
