"""The CUDA worker and model runner of a hypic engine."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from ..backends.attention.cuda import HypicCUDAAttentionImpl
from ..backends.attention.cuda_decode import DecodePlans
from ..backends.attention.cuda_rows import Heads
from ..backends.ops.span_attention.fixed import FixedPlans
from ..config.engine import config_of
from ..errors import ConfigError
from ..pool.copy.staging import device_staging_bytes
from .cuda_graphs import ComposedBatch, ComposedGraphs
from .worker import HypicModelRunner, HypicWorker, current_step, worker_connector

logger = init_logger("vllm.hypic.worker")


class HypicGPUModelRunner(HypicModelRunner, GPUModelRunner):
    """vLLM's V1 model runner with logical positions."""

    _graphs: ComposedGraphs | None = None
    """Full CUDA graphs with the plugin's operators; ``None`` if a layer's operators cannot be captured."""
    _counts_twice = False
    """Whether vLLM profiles graph memory now and each full decode graph will get a second, composed graph."""
    _named: ComposedBatch | None = None
    """The batch of the second capture, while that capture is profiled."""

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
            # vLLM would also refuse, but its message does not name the pool's options.
            raise ConfigError(
                f"hypic: {blocks} blocks of states fit beside the pool, but full CUDA graphs need a block "
                f"for each of --max-num-seqs={most} requests: lower --max-num-seqs to {blocks}, or lower "
                "pool_fraction or pool_bytes"
            )
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        self._counts_twice = is_profiling and self._composes_in_graphs()
        if not is_profiling:
            self._prepare_decodes()

    def _attention(self) -> list[Any]:
        """Return the attention implementations of all layers, the plugin's and vLLM's."""
        layers = self.compilation_config.static_forward_context.values()
        linked = [layer for layer in layers if isinstance(layer, AttentionLayerBase)]
        return [impl for layer in linked if (impl := getattr(layer, "impl", None)) is not None]

    def _decode_heads(self) -> set[Heads]:
        """Return the head shapes of layers whose launches in a decode pass can be captured and replayed."""
        if self.uniform_decode_query_len > 1:
            return set()
        return {
            (impl.num_heads, impl.num_kv_heads, impl.head_size, self.model_config.dtype)
            for impl in self._attention()
            if isinstance(impl, HypicCUDAAttentionImpl) and impl.decodes_in_fixed_shapes
        }

    def _composes_in_graphs(self) -> bool:
        """Return whether decode passes of composed requests may be full CUDA graphs."""
        # Stages and replicas must choose alike, but each sees only its own layers and requests.
        parallel = self.vllm_config.parallel_config
        alone = parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1
        fixed = [
            isinstance(i, HypicCUDAAttentionImpl) and i.decodes_in_fixed_shapes for i in self._attention()
        ]
        return alone and bool(self._decode_heads()) and all(fixed)

    def _prepare_decodes(self) -> None:
        """Allocate buffers for decode passes, if some layers' launches can be captured and replayed."""
        if not (kinds := self._decode_heads()):
            return
        runtime = worker_connector().runtime
        assert runtime is not None
        plans = runtime.shared.of(DecodePlans)
        plans.most = self.max_num_reqs
        for heads in kinds:
            plans.made(heads, self.device)
        if self._composes_in_graphs():
            self._graphs = ComposedGraphs(plans)

    def decode_bytes(self) -> int:
        """Return the bytes of device memory for those buffers and for operators' results in graphs.
        A graph holds the results of one layer only, because all layers' results share one place."""
        made = [FixedPlans(self.max_num_reqs, *heads, torch.device("meta")) for heads in self._decode_heads()]
        buffers = sum(plans.nbytes for plans in made)
        graphs = self.compilation_config.cudagraph_mode
        if graphs is None or not graphs.has_full_cudagraphs() or not self._composes_in_graphs():
            return buffers
        return buffers + max(plans.result_bytes(self.max_num_reqs) for plans in made)

    def _log_operators(self) -> None:
        logger.info("hypic: layers run Triton operators")

    def _warmup_and_capture(
        self, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> None:
        """Capture vLLM's graph and, for a full graph of a decode pass, a second graph with hypic operators.
        While vLLM profiles graph memory, the second graph holds stock code, too."""
        super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)
        if cudagraph_runtime_mode != CUDAGraphMode.FULL or not desc.uniform:
            return
        if self._counts_twice:
            self._named = ComposedBatch.of(desc)
            try:
                return super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)
            finally:
                self._named = None
        if self._graphs is None:
            return
        runtime = worker_connector().runtime
        assert runtime is not None
        with self._graphs.capturing(desc, runtime):
            super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Keep passes with composed rows from replaying a full CUDA graph of stock code alone.

        A decode pass replays the graph of its size with hypic operators, if that graph exists.  For other
        passes with composed rows, vLLM is told that the batch is no uniform decode.  vLLM then treats the
        batch as mixed, for which the attention backend admits no full graphs (``get_cudagraph_support``).
        The pass runs in piecewise graphs, between which attention operators run eagerly, or in no graph.
        Passes of plain requests stay unchanged.
        """
        step = current_step()
        if step is None:
            mode, desc, *others = super()._determine_batch_execution_and_padding(*args, **kwargs)
            if self._named is not None and mode == CUDAGraphMode.FULL:
                desc = self._named
            return mode, desc, *others
        if self._graphs is not None and step.decoding is not None:
            mode, desc, *others = super()._determine_batch_execution_and_padding(*args, **kwargs)
            if mode != CUDAGraphMode.FULL:
                return mode, desc, *others
            if (with_ours := self._graphs.for_pass(desc, step)) is not None:
                return mode, with_ours, *others
        kwargs["force_uniform_decode"] = False
        return super()._determine_batch_execution_and_padding(*args, **kwargs)


class HypicGPUWorker(HypicWorker, Worker):
    """vLLM's CUDA worker with the plugin's layers and model runner, and with memory left for the pool."""

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
        found += device_staging_bytes(config_of(self.vllm_config)) + self.model_runner.decode_bytes()
        logger.info("hypic reserves %.2f GiB of device memory for operators", found / 2**30)
        return found

    def _make_model_runner(self) -> HypicGPUModelRunner:
        if self.use_v2_model_runner:
            raise RuntimeError("hypic needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
        return HypicGPUModelRunner(self.vllm_config, self.device)
