"""The facade that vLLM calls: it builds the half of its role and forwards calls.  It holds no logic."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from ..config.drafting import looks_drafts_up
from .build import build_scheduler_connector, build_worker_connector
from .metadata import HypicMetadata, WorkerReport
from .passes import passes, prompt_readers
from .stats import HypicCounters, HypicPromMetrics, HypicStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .scheduler.connector import SchedulerConnector
    from .worker.connector import WorkerConnector


logger = init_logger("vllm.hypic.connector")


class HypicConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector of the plugin; ``supports_hma`` because hybrids have several KV cache groups."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: SchedulerConnector | None = None
        self.worker: WorkerConnector | None = None
        self._told: HypicCounters | None = None
        self._looks_drafts_up = looks_drafts_up(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = build_scheduler_connector(vllm_config, kv_cache_config)
            self._reads_prompt = prompt_readers(vllm_config)
        else:
            self.worker = build_worker_connector(vllm_config, kv_cache_config)

    # -- scheduler side ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        return (0 if self.scheduler.ready(request.request_id) else None), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self.scheduler is not None
        metadata = HypicMetadata(finished=set(scheduler_output.finished_req_ids))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.scheduler.instruct(metadata, passes(scheduler_output), drafts)
        for new in scheduler_output.scheduled_new_reqs:
            sampling = new.sampling_params
            asked = sampling is not None and self._reads_prompt(sampling)
            self.scheduler.introduce(metadata, new.req_id, with_prompt=asked or self._looks_drafts_up)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self.scheduler is not None
        if isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport):
            self.scheduler.absorb(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        from vllm.v1.request import RequestStatus

        assert self.scheduler is not None
        completed = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        )
        left = completed or request.status is RequestStatus.FINISHED_ABORTED
        self.scheduler.finished(
            request.request_id, completed=completed, tokens=request.all_token_ids if left else ()
        )
        return False, None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.scheduler is None or (counters := self.scheduler.take_counters()) == self._told:
            return None  # vLLM asks in every step, and most decode steps change nothing
        self._told = counters.levels()
        return HypicStats.of(counters)

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.needs_step

    def reset_cache(self) -> bool | None:
        assert self.scheduler is not None
        logger.info("hypic: a reset of the caches drops all records")
        self.scheduler.reset(secrets.token_hex(16))
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return HypicStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return HypicPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pass

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert self.worker is not None and isinstance(connector_metadata, HypicMetadata)
        self.worker.absorb(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        assert self.worker is not None
        self.worker.end_step()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self.worker is None else self.worker.take_report()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
