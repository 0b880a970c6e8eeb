"""The CUDA worker and model runner of a hypic engine."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from ..config.engine import config_of
from ..errors import ConfigError
from ..pool.copy.staging import device_staging_bytes
from .worker import HypicModelRunner, HypicWorker, current_step

logger = init_logger("vllm.hypic.worker")


class HypicGPUModelRunner(HypicModelRunner, GPUModelRunner):
    """vLLM's V1 model runner with logical positions."""

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        blocks, most = kv_cache_config.num_blocks, self.max_num_reqs
        graphs = self.compilation_config.cudagraph_mode
        if (
            not is_profiling
            and graphs is not None
            and graphs.has_full_cudagraphs()
            and kv_cache_config.has_mamba_layers
            and blocks < most
        ):
            # vLLM would refuse, too, and not know of the pool.
            raise ConfigError(
                f"hypic: {blocks} blocks of states beside the public pool, for --max-num-seqs {most}: full "
                f"CUDA graphs need one for each; lower --max-num-seqs to {blocks}, or pool_fraction or "
                "pool_bytes"
            )
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)

    def _log_operators(self) -> None:
        logger.info("hypic: Triton operators")

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """A pass with rows of ours never replays a full CUDA graph, which holds stock code alone.

        Told that the batch is no uniform decode, vLLM takes the path of mixed batches, for which the
        attention backend admits no full graphs either (``get_cudagraph_support``): piecewise ones, between
        which the attention operators run eagerly, or none.  Passes of plain requests are left as they are.
        """
        if current_step() is not None:
            kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class HypicGPUWorker(HypicWorker, Worker):
    """vLLM's CUDA worker with our layers, our model runner, and room left for the public pool."""

    def init_device(self) -> None:
        from ..patches import cuda_kept_lse

        self._register_layers()
        cuda_kept_lse.apply()
        super().init_device()

    def _scratch_bytes(self) -> int:
        from ..backends.cuda_support import scratch_bytes

        found = scratch_bytes(
            self.vllm_config.compilation_config.static_forward_context.values(),
            self.vllm_config.scheduler_config.max_num_batched_tokens,
            self.model_config.dtype,
        )
        found += device_staging_bytes(config_of(self.vllm_config))
        logger.info("hypic: %.2f GiB left for operators", found / 2**30)
        return found

    def _make_model_runner(self) -> HypicGPUModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("hypic needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        return HypicGPUModelRunner(self.vllm_config, self.device)
