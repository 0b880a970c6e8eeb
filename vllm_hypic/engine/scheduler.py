"""HypicScheduler: vLLM's scheduler plus internal segment requests.

The plugin sets ``--scheduler-cls vllm_hypic.engine.scheduler.HypicScheduler``, which makes the synchronous
or the asynchronous variant, by the engine's configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from queue import Queue
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ..cache_api.answers import Explanation
from ..cache_api.commands import COMMAND, AnyCommand, Compile, Explain, Failure, take_command
from ..cache_api.handler import CommandHandler
from ..cache_api.registry import SegmentRegistry, registry_folder
from ..connector.passes import passes
from ..connector.scheduler.connector import SchedulerConnector
from ..connector.scheduler.planning import PlanRequest
from ..connector.scheduler.segment_requests import SegmentRequest
from ..primitives.options import PUSH_TO, Transfer
from ..primitives.pieces import PromptError
from ..primitives.plan import PromptPlan
from ..primitives.policies import LinkError
from ..primitives.tokens import Marker, split_ids
from .explaining import explanation
from .front_end import reason_not_to_cut
from .idle_wait import IdleWait, watch_arrivals
from .instance import RoutedInstance
from .kv_events import PlainEvents
from .media import MediaReader, in_stream, moved
from .prompt_counts import PromptCounts
from .prompt_logprobs import PromptLogprobs
from .weights import Adapters, may_change_weights

if TYPE_CHECKING:
    from vllm.distributed.kv_events import EventPublisher
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger("vllm.hypic.scheduler")


class _HypicMixin(Scheduler):
    """Adds segment requests, waiting for records and warm-up prompts to a vLLM scheduler."""

    need_mamba_block_aligned_split: bool
    kv_event_publisher: EventPublisher

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Stock vLLM calls _mamba_block_aligned_split only if its prefix cache keeps states.
        self._splits_for_states = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split = self.has_mamba_layers or self.num_spec_tokens > 0
        from ..connector.multi_connector import own_connector

        own = own_connector(self.connector)
        if own is None or own.scheduler is None:
            raise ValueError(
                "HypicScheduler needs HypicConnector as the KV connector, "
                f"got {type(self.connector).__name__}; use --attention-backend hypic"
            )
        self.hypic: SchedulerConnector = own.scheduler
        self._has_others = own is not self.connector
        """Whether the engine has other KV connectors beside HypicConnector."""
        if not self._has_others:
            # vLLM defers frees for connectors that fill blocks outside the model's device stream, unlike
            # HypicConnector.  Deferred blocks would stop cache resets between two overlapping steps.
            self.defer_block_free = False
        # Every salt made here contains the secret, so no client can name such a salt and read its blocks.
        self._secret = secrets.token_hex(16)
        self._events = PlainEvents(self.kv_event_publisher)
        self.kv_event_publisher = self._events
        # Final status of each request that never runs and ends once its records are resident.
        self._ending: dict[str, RequestStatus] = {}
        model = self.vllm_config.model_config
        self._media = MediaReader(model)
        self.adapters = Adapters(self.requests.values, self.hypic.reset)
        self._images: WeakKeyDictionary[Request, list[MultiModalFeatureSpec]] = WeakKeyDictionary()
        """All images of each composed request and of its segment requests; the composed request itself keeps
        only the images of its stream."""
        served = model.served_model_name
        self._instance = RoutedInstance(
            self.hypic, (served,) if isinstance(served, str) else tuple(served), model.max_model_len
        )
        folder = registry_folder(self.hypic.config.store)
        self._commands = CommandHandler(
            lambda: SegmentRegistry(
                folder,
                self.hypic.namespace.digest,
                most=self.hypic.config.max_tenant_segments,
                replica=self.vllm_config.parallel_config.data_parallel_index,
            ),
            self.hypic.retention,
            self._tenant,
            describe=self._instance.describe,
            name_weights=self.hypic.name_weights,
        )
        self._commands.start()
        self._prompt_logprobs = PromptLogprobs(self.hypic.ids)
        self._counts = PromptCounts(self.hypic, alone=not self._has_others)
        self._idle_wait = IdleWait()
        self._ran = True
        """Whether tokens ran in the last step, or a request has arrived since."""

    def take_inbox(self, inbox: Queue[Any]) -> None:
        """Set the queue in which the engine's requests arrive (called by ``patches/engine_inbox.py``)."""
        self._idle_wait = IdleWait(inbox, watch_arrivals)

    def workers_called(self, method: str | Callable[..., Any]) -> bool:
        """Begin a new generation of records and return true if a worker call may have changed weights."""
        if not may_change_weights(method):
            return False
        name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        logger.info("hypic: %s may have changed weights: the engine drops all records", name)
        self.hypic.reset(secrets.token_hex(16))
        self.adapters.forget()
        return True

    def _tenant(self, salt: str | None) -> str:
        """Return a digest of the salt, which names the tenant without showing the salt."""
        return self.hypic.namespace.scoped(salt=salt, lora=None).digest

    def add_request(self, request: Request) -> None:
        self._ran = True
        if request.request_id not in self.requests and request.prompt_token_ids is not None:
            self._receive(request)
        self._keep_apart(request)
        super().add_request(request)

    def _keep_apart(self, request: Request) -> None:
        """Change the request's salt so that it finds no vLLM blocks of its adapter's former weights."""
        if request.lora_request is not None and (salt := self.adapters.salt(request.lora_request)):
            self._events.hide(request)
            _set_salt(request, f"hypic:{self._secret}:adapter:{salt}:{request.cache_salt or ''}")

    def _receive(self, request: Request) -> None:
        """Plan a new request and admit it; a command of the cache API goes to its handler."""
        command = _take_command(request)
        if isinstance(command, Explain):
            self._explain(request)
            return
        if command is not None and not isinstance(command, Compile):
            self._commands.submit(request.request_id, command, request.cache_salt)
            self._end_unrun(request, RequestStatus.FINISHED_STOPPED)
            return
        try:
            wanted = self._plan_request(request, lambda: self._may_record_prefix(request))
            if (found := wanted.spec.found) is not None and found.counts:
                self.hypic.count_found(found)
            plan, transfer = self.hypic.plan(wanted), wanted.spec.transfer
            if transfer.push_to is not None and (plan is None or not plan.warm_only):
                raise LinkError(f"{PUSH_TO}: expected a prompt that ends in a separator")
        except (LinkError, PromptError) as e:
            # The front end answers these errors with HTTP 400.  A client that talks to the engine core
            # directly gets a request that finishes with an error; the engine lives on.
            logger.error("request %s refused: %s", request.request_id, e)
            _replace_tokens(request, [0], request.cache_salt)
            self._end_unrun(request, RequestStatus.FINISHED_ERROR)
            return
        if isinstance(command, Compile):
            # The command's prompt is a warm-up prompt of one segment; the segment gets its id at the end.
            pieces = split_ids(wanted.token_ids, self.hypic.ids)
            [tokens] = (piece for piece in pieces if not isinstance(piece, Marker))
            # The id outlives this generation of records, so the registry gets the renamed key.
            key = self.hypic.namespace.renamed(plan.segments[0].key) if plan and plan.segments else None
            self._commands.submit_compile(request.request_id, command, tokens, key, request.cache_salt)
        if plan is not None:
            self._look_for_reasoning(request)
            self._counts.expect(request.request_id, len(wanted.token_ids))
            self._prompt_logprobs.expect(request, wanted.token_ids, plan)
            is_prefix = bool(plan.segments) and plan.segments[0].is_prefix
            self._adopt(request, plan, transfer, "prefix" if is_prefix else wanted.spec.way)

    def _may_record_prefix(self, request: Request) -> bool:
        """Return whether the prefix of a prompt without segments may become a record."""
        if self.hypic.config.prefix == "stock":
            return False
        is_text = request.sampling_params is not None and not request.resumable
        return is_text and reason_not_to_cut(request, self.hypic.ids) is None

    def _plan_request(self, request: Request, may_record_prefix: Callable[[], bool] = bool) -> PlanRequest:
        """Return the planner's view of a request.  Raises ``LinkError``."""
        params, lora = request.sampling_params, request.lora_request
        ids = request.prompt_token_ids or []
        return PlanRequest(
            token_ids=ids,
            spec=self.hypic.spec(None if params is None else params.extra_args, len(ids)),
            salt=request.cache_salt,
            lora=None if lora is None else self.adapters.name(lora),
            media=lambda: self._media.of(request.mm_features, ids),
            may_record_prefix=may_record_prefix,
        )

    def _look_for_reasoning(self, request: Request) -> None:
        """Set ``reasoning_ended``, behind which grammars begin, while the request has its whole prompt."""
        asked = request.structured_output_request
        if asked is None or asked.reasoning_ended is not None:
            return
        reasoner = self.structured_output_manager._get_reasoner(request)
        if reasoner is not None:
            asked.reasoning_ended = reasoner.is_reasoning_end(request.prompt_token_ids or [])

    def _explain(self, request: Request) -> None:
        """Submit the explanation of the request as its answer, and end the request unrun.
        The look-up of records moves, loads and keeps no record."""
        self.hypic.drop_expired()  # the next pass would drop the same records
        uncut = reason_not_to_cut(request, self.hypic.ids)
        answer: Explanation | Failure
        try:
            wanted = self._plan_request(request)
            if (plan := self.hypic.plan(wanted)) is not None:
                self._set_stream(request, plan)
            self._keep_apart(request)
            prefix_cached = self.kv_cache_manager.get_computed_blocks(request)[1]
            answer = explanation(wanted, plan, self.hypic, prefix_cached=prefix_cached, uncut=uncut)
        except (LinkError, PromptError) as e:
            answer = Failure(400, str(e))
        self._commands.submit_answer(request.request_id, answer)
        _replace_tokens(request, [0], request.cache_salt)
        self._end_unrun(request, RequestStatus.FINISHED_STOPPED)

    def _adopt(self, request: Request, plan: PromptPlan, transfer: Transfer, mode: str) -> None:
        """Make the plan's stream the request's tokens, and let the request wait for its records."""
        if plan.warm_only:
            self._end_unrun(request, RequestStatus.FINISHED_STOPPED)
        tenant = self._tenant(request.cache_salt)
        self._set_stream(request, plan)
        room = self.max_model_len - plan.n_logical
        request.max_tokens = max(1, min(request.max_tokens, room))
        if request.sampling_params is not None:
            request.sampling_params.min_tokens = min(request.sampling_params.min_tokens, request.max_tokens)
        if plan.segments or plan.salt is not None:
            self.hypic.admit(
                request.request_id,
                plan,
                transfer,
                tenant=tenant,
                mode=mode,
                priority=request.priority if self.policy is SchedulingPolicy.PRIORITY else 0,
                max_tokens=request.max_tokens,
            )

    def _set_stream(self, request: Request, plan: PromptPlan) -> None:
        """Make the plan's stream the request's tokens."""
        salt = request.cache_salt
        if plan.salt is not None:
            salt = f"hypic:{self._secret}:{plan.salt}:{self._tenant(salt)}"
        if request.skip_reading_prefix_cache and plan.segments:
            # For such requests vLLM ignores a connector's "not yet"; an unshared salt bypasses the cache.
            request.skip_reading_prefix_cache = False
            salt = f"hypic:{self._secret}:unshared:{request.request_id}"
        if salt != request.cache_salt:
            self._events.hide(request)  # its tokens begin no prompt, or nobody finds their blocks
        # A warm-up prompt may have an empty stream.  vLLM requires a token, though the prompt never runs.
        stream = list(plan.stream) or [plan.segments[-1].tokens[-1]]
        if request.mm_features:
            self._images[request] = request.mm_features
            request.mm_features = in_stream(request.mm_features, plan)
        _replace_tokens(request, stream, salt)

    def _end_unrun(self, request: Request, status: RequestStatus) -> None:
        """Let the request end with ``status`` once its records are resident, without ever being scheduled."""
        # vLLM does not ask the connector about requests that skip the prefix cache, and would run them.
        request.skip_reading_prefix_cache = False
        self._ending[request.request_id] = status
        self.hypic.hold(request.request_id)

    def _finish_ending(self) -> list[tuple[EngineCoreOutput, int]]:
        """Finish the unrun requests whose records are delivered; return pairs of output and client index."""
        finished = []
        for request_id, status in list(self._ending.items()):
            request = self.requests.get(request_id)
            if request is not None and not self.hypic.over(request_id):
                continue
            if (fault := self.hypic.push_fault(request_id)) is not None:
                logger.warning("request %s: a record was not delivered: %s", request_id, fault)
                status = RequestStatus.FINISHED_ERROR
            del self._ending[request_id]
            self.hypic.unhold(request_id)
            if request is None:
                self._commands.forget(request_id)
                continue
            answer = self._commands.take_answer(request_id)
            nulls = self._prompt_logprobs.of_prompt(request_id, None)
            counted = self._counts.end_unrun(request_id) if status is RequestStatus.FINISHED_STOPPED else None
            if self.finish_requests(request_id, status):
                reason = request.get_finished_reason()
                output = EngineCoreOutput(request_id, [], finish_reason=reason, kv_transfer_params=answer)
                output.new_prompt_logprobs_tensors, output.prefill_stats = nulls, counted
                finished.append((output, request.client_index))
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._ran or not self.hypic.awaits_records:
            self._idle_wait.reset()
        else:
            self._idle_wait.wait(until_woken=self.hypic.only_loads_matter and not self._has_others)
        self._end_unwanted()
        start = self.hypic.begin_pass()
        for segment in start.segment_requests:
            super().add_request(self._segment_request(segment))
        for request_id, plan in start.restarted.items():
            _replace_tokens(self.requests[request_id], list(plan.stream), self._unshared_salt(request_id))
        self._raise(start.raised)
        output = super().schedule(*args, **kwargs)
        self._counts.scheduled(output, self.requests, self.kv_cache_manager.prefix_cache_lookup_enabled)
        self._instance.publish(self._unprefilled_tokens())
        self._ran = bool(output.total_num_scheduled_tokens)
        return output

    def _end_unwanted(self) -> None:
        """End the segment requests that no request waits for any more.
        Segment requests that have begun go on: a later request then finds the record."""
        while unwanted := [r for r in self.hypic.take_unwanted() if not self.requests[r].num_computed_tokens]:
            self.finish_requests(unwanted, RequestStatus.FINISHED_ABORTED)

    def _unprefilled_tokens(self) -> int:
        """Return the number of prompt tokens that are still to be computed, over all requests."""
        return sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in self.requests.values())

    def _segment_request(self, segment: SegmentRequest) -> Request:
        owner = self.requests[segment.for_request]
        images = {feature.identifier: feature for feature in self._images.get(owner, ())}
        request = Request(
            request_id=segment.request_id,
            prompt_token_ids=segment.token_ids,
            # vLLM does not ask the connector about requests that skip the prefix cache, so these cannot wait.
            sampling_params=SamplingParams(
                max_tokens=1, temperature=0.0, skip_reading_prefix_cache=not segment.waits
            ),
            pooling_params=None,
            mm_features=[moved(images[medium.digest], medium.start) for medium in segment.media],
            client_index=owner.client_index,
            arrival_time=owner.arrival_time,
            lora_request=owner.lora_request,
            # The KV of an isolated segment is wrong for every other request.
            cache_salt=self._unshared_salt(segment.request_id),
            priority=segment.priority,
            block_hasher=owner._block_hasher,
        )
        self._events.hide(request)
        if images:  # a context may be computed for a segment request alone
            self._images[request] = list(images.values())
        return request

    def _raise(self, priorities: Mapping[str, int]) -> None:
        """Set higher priorities (by request id), also in the queues where the requests wait."""
        raised = {request for r in priorities if (request := self.requests.get(r)) is not None}
        if not raised:
            return
        queues = (self.waiting, self.kv_holding_waiting)
        moved = [raised.intersection(queue) for queue in queues]
        for queue, requests in zip(queues, moved, strict=True):
            queue.remove_requests(requests)
        for request in raised:
            request.priority = priorities[request.request_id]
        for queue, requests in zip(queues, moved, strict=True):
            for request in requests:
                queue.add_request(request)

    def _unshared_salt(self, request_id: str) -> str:
        """Return the cache salt of a captured request.
        Such a request computes all its tokens, and shares no block of vLLM's prefix cache with others."""
        return f"hypic:{self._secret}:captured:{request_id}"

    def _is_captured(self, request: Request) -> bool:
        return request.cache_salt == self._unshared_salt(request.request_id)

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args: Any) -> int:
        """Return how many of ``num_new_tokens`` the request computes in this pass.

        Stock vLLM ends chunks where its prefix cache keeps states, which costs a step for the prompt's rest.
        No request resumes from a captured request's states, so captured prompts are not split or drafted for.
        With linear layers, drafts do not pad a pass of one prompt token, which may be the prompt's first.
        No chunk ends inside an island, whose state is not the request's: an island without room waits.
        Drafts end at the model's last logical position, which the shorter stream does not show.
        """
        begin = request.num_computed_tokens + sum(args)
        if self._is_captured(request) and begin < request.num_prompt_tokens:
            return min(num_new_tokens, request.num_tokens - begin)
        if self.has_mamba_layers:
            known = request.num_tokens_with_spec + request.num_output_placeholders
            num_new_tokens = min(num_new_tokens, known - begin)
        if self._splits_for_states:
            num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *args)
        end = begin + num_new_tokens
        if (plan := self.hypic.plan_of(request.request_id)) is not None:
            most = self.max_model_len - 1 - (plan.n_logical - len(plan.stream))
            end = min(end, max(request.num_tokens, most))
        generates = begin >= request.num_prompt_tokens
        return max(0, self.hypic.limit_pass(request.request_id, begin, end, generates=generates) - begin)

    def _free_request_blocks(self, request: Request) -> None:
        """Free the blocks; those of captured requests also leave the prefix cache.
        Such blocks are useless to other requests, and would push useful blocks out of the cache."""
        if self._is_captured(request):
            groups = self.kv_cache_manager.get_block_ids(request.request_id)
            self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        super()._free_request_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        self._prompt_logprobs.forget(request.request_id)
        if request.lora_request is not None:
            self.adapters.ended(request.lora_request)
        super()._free_blocks(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # With several batches in flight, a step may schedule nothing while an earlier step still runs.
        self._ran |= bool(scheduler_output.total_num_scheduled_tokens)
        self.hypic.end_pass(passes(scheduler_output))
        # Stock code forgets the requests that end in this step before it returns their outputs.
        internal = {r for r in scheduler_output.num_scheduled_tokens if self.hypic.is_internal(r)}
        prompts = model_runner_output.prompt_logprobs_dict
        for request_id, stream in prompts.items():
            prompts[request_id] = self._prompt_logprobs.of_prompt(request_id, stream)
        # With a segment request, the requests that need its record end: the segment cannot be computed.
        self.encoder_cache_mismatch_reqs |= self.hypic.requesters_of(self.encoder_cache_mismatch_reqs)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for core_outputs in outputs.values():
            core_outputs.outputs = [o for o in core_outputs.outputs if o.request_id not in internal]
            for output in core_outputs.outputs:
                self._counts.prefilled(output)
        for output, client in self._finish_ending():
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._counts.correct(outputs.values())
        self._instance.publish(self._unprefilled_tokens())
        return outputs

    def shutdown(self) -> None:
        self._instance.close()
        super().shutdown()


def _take_command(request: Request) -> AnyCommand | Failure | None:
    """Remove the cache API's command from the request and return it; ``None`` without a command."""
    params = request.sampling_params
    if params is None or not params.extra_args or COMMAND not in params.extra_args:
        return None
    command, params.extra_args = take_command(params.extra_args)
    return command


def _replace_tokens(request: Request, tokens: list[int], salt: str | None) -> None:
    """Give a request that was never scheduled other prompt tokens.

    The list changes in place, because ``all_token_ids`` is a view of it; block hashes are made anew.
    """
    request.prompt_token_ids = tokens
    request._all_token_ids[:] = tokens
    request.num_prompt_tokens = len(tokens)
    _set_salt(request, salt)


def _set_salt(request: Request, salt: str | None) -> None:
    """Give a request that was never scheduled another cache salt."""
    request.cache_salt = salt
    request.block_hashes = []
    request.update_block_hashes()


class HypicSyncScheduler(_HypicMixin):
    """vLLM's synchronous scheduler with segment requests."""


class HypicAsyncScheduler(_HypicMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with segment requests."""


class HypicScheduler:
    """Makes the synchronous or the asynchronous scheduler, when the engine core creates its scheduler.
    Only then vLLM has decided whether asynchronous scheduling is on."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = HypicAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HypicSyncScheduler
        return chosen(vllm_config, *args, **kwargs)
