"""vLLM's ``MultiConnector`` with the plugin's connector first: all other connectors see plain requests alone.

vLLM takes a composed request's stream for its tokens, and the request's blocks depend on records; a segment
request computes one segment alone.  Neither token sequence begins a prompt.  So these requests are hidden
from connectors that name blocks by the tokens before them (offloading, LMCache, split prefill and decode).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from .connector import HypicConnector
from .metadata import HypicMetadata

if TYPE_CHECKING:
    from collections.abc import Set

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class MultiConnector(multi_connector.MultiConnector):
    """Hides composed and segment requests from all connectors but the plugin's.

    The class has vLLM's name, as vLLM checks by this name which features several connectors support."""

    _extra_async_saves: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self._connectors[0]
        assert isinstance(own, HypicConnector)
        self.own: HypicConnector = own
        self._hidden: set[str] = set()
        """Requests hidden from all other connectors, until a step reports their end."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(c.supports_divergent_local_hybrid_hits for c in self._connectors[1:])

    @property
    def requires_kv_delivery(self) -> bool:
        return any(c.requires_kv_delivery for c in self._connectors[1:])

    # -- scheduler side ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        assert self.own.scheduler is not None
        if self.own.scheduler.is_private(request.request_id):
            self._hidden.add(request.request_id)
            self.own.on_new_request(request)
        else:
            super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id in self._hidden:
            return self.own.get_num_new_matched_tokens(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if request.request_id in self._hidden:
            self.own.update_state_after_alloc(request, blocks, num_external_tokens)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        shown = _without(scheduler_output, self._hidden)
        self._hidden -= scheduler_output.finished_req_ids
        own, *others = self._connectors
        metadata = [own.build_connector_meta(scheduler_output)]
        metadata += [c.build_connector_meta(shown) for c in others]
        saves, self._extra_async_saves = self._extra_async_saves, {}
        return MultiKVConnectorMetadata(tuple(metadata), saves or None)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self._hidden:
            return self.own.request_finished(request, blocks)
        return super().request_finished(request, blocks)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self._hidden:
            return self.own.request_finished_all_groups(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def register_finished_partial_tail(self, request: Request, *args: Any) -> bool:
        if request.request_id in self._hidden:
            return self.own.register_finished_partial_tail(request, *args)
        return super().register_finished_partial_tail(request, *args)


def own_connector(connector: object) -> HypicConnector | None:
    """Return the plugin's connector in an engine's connector, for one role; ``None`` without it."""
    if isinstance(connector, MultiConnector):
        return connector.own
    return connector if isinstance(connector, HypicConnector) else None


def own_metadata(metadata: object) -> HypicMetadata:
    """Return the plugin's part of a step's metadata of an engine's connector."""
    if isinstance(metadata, MultiKVConnectorMetadata):
        metadata = metadata.metadata[0]
    assert isinstance(metadata, HypicMetadata)
    return metadata


def _without(output: SchedulerOutput, hidden: Set[str]) -> SchedulerOutput:
    """Return the output that a scheduler would have made without the ``hidden`` requests."""
    if not hidden:
        return output

    def shown(of: dict[str, Any]) -> dict[str, Any]:
        return {request_id: value for request_id, value in of.items() if request_id not in hidden}

    cached, state = output.scheduled_cached_reqs, output.kv_connector_block_state
    rows = [i for i, request_id in enumerate(cached.req_ids) if request_id not in hidden]

    def picked(of: list[Any]) -> list[Any]:
        return [of[i] for i in rows] if of else []

    scheduled = shown(output.num_scheduled_tokens)
    return replace(
        output,
        scheduled_new_reqs=[new for new in output.scheduled_new_reqs if new.req_id not in hidden],
        scheduled_cached_reqs=replace(
            cached,
            req_ids=picked(cached.req_ids),
            resumed_req_ids=cached.resumed_req_ids - hidden,
            new_token_ids=picked(cached.new_token_ids),
            all_token_ids=shown(cached.all_token_ids),
            new_block_ids=picked(cached.new_block_ids),
            num_computed_tokens=picked(cached.num_computed_tokens),
            num_output_tokens=picked(cached.num_output_tokens),
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=shown(output.scheduled_spec_decode_tokens),
        scheduled_encoder_inputs=shown(output.scheduled_encoder_inputs),
        finished_req_ids=output.finished_req_ids - hidden,
        preempted_req_ids=output.preempted_req_ids and output.preempted_req_ids - hidden,
        kv_connector_block_state=state
        and replace(
            state,
            req_ids=state.req_ids - hidden,
            boundary_state_offloads=shown(state.boundary_state_offloads),
        ),
    )
