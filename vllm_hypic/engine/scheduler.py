"""HypicScheduler: vLLM's scheduler plus internal segment requests.

``--scheduler-cls vllm_hypic.engine.scheduler.HypicScheduler`` (set by the plugin itself) gives the
synchronous or the asynchronous variant, as the engine is configured.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from queue import Queue
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from ..cache_api.commands import (
    COMMAND,
    Answer,
    AnyCommand,
    Compile,
    Failure,
    command_of,
    pack,
)
from ..cache_api.handler import Desk
from ..cache_api.registry import Catalogue, catalogue_path
from ..connector.scheduler.directory import Lookup
from ..connector.scheduler.side import Ask, SchedulerSide, SegmentJob
from ..primitives.options import PUSH_TO, Transfer
from ..primitives.plan import PromptError, PromptPlan
from ..primitives.policies import LinkError
from ..primitives.tokens import Marker, split_ids
from ..segment_parallel.description import Description
from .idle_wait import Naps, watch_receiver

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from ..segment_parallel.events import Publisher

logger = init_logger("vllm.hypic.scheduler")


class _HypicMixin(Scheduler):
    """Adds segment requests, waiting for records and warm-up prompts to a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from ..connector.connector import HypicConnector

        if not isinstance(self.connector, HypicConnector) or self.connector.scheduler is None:
            raise ValueError(
                "HypicScheduler needs HypicConnector as the KV connector, "
                f"got {type(self.connector).__name__}; use --attention-backend hypic"
            )
        self.hypic: SchedulerSide = self.connector.scheduler
        # In every cache salt of ours, so that no client can name one and read another's blocks.
        self._secret = secrets.token_hex(16)
        self._instance = secrets.token_hex(8)
        self._segment_salt = f"hypic:{self._secret}:segment"
        # Requests that are over as soon as their records are resident, and how they end.
        self._ending: dict[str, RequestStatus] = {}
        # What ended commands of the cache API will say.
        self._answers: dict[str, Callable[[], Answer]] = {}
        path = catalogue_path(self.hypic.config.store)
        self._desk = Desk(
            lambda: Catalogue(path),
            self.hypic.upkeep,
            self._tenant,
            self._pool_numbers,
            describe=self._description,
        )
        self._desk.start()
        self._publisher = self._open_publisher()
        self._naps = Naps()
        self._ran = True
        """Something ran in the last step, or has come in since."""

    def take_inbox(self, inbox: Queue[Any]) -> None:
        """``patches/engine_inbox.py`` tells where the engine's requests come in."""
        self._naps = Naps(inbox, watch_receiver)

    def _open_publisher(self) -> Publisher | None:
        """Tells routers what is cached here."""
        parallel = self.hypic.config.segment_parallel
        if parallel is None:
            return None
        from ..segment_parallel.events import Publisher
        from ..segment_parallel.secret import Secret

        self.hypic.directory.watch()
        return Publisher(parallel.events, Secret.read(parallel.secret_file))

    def _publish(self) -> None:
        if self._publisher is None:
            return
        by_state: dict[Lookup, list[str]] = {state: [] for state in Lookup}
        for key, state in self.hypic.directory.take_changes().items():
            by_state[state].append(key)
        self._publisher.change(
            by_state[Lookup.HIT], by_state[Lookup.PENDING], by_state[Lookup.MISS], self._unprefilled()
        )

    def _unprefilled(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in self.requests.values())

    def _description(self) -> Description | None:
        hypic, parallel = self.hypic, self.hypic.config.segment_parallel
        if parallel is None:
            return None
        model, ids = self.vllm_config.model_config, hypic.ids
        served = model.served_model_name
        return Description(
            instance=self._instance,
            models=(served,) if isinstance(served, str) else tuple(served),
            namespace=hypic.namespace.digest,
            receiver=parallel.receiver_url,
            events=parallel.events_url,
            separator=ids.sep,
            pdep=ids.pdep,
            pad=ids.pad,
            link=hypic.config.link,
            seam_tokens=hypic.config.seam_tokens,
            min_segment_tokens=hypic.config.min_segment_tokens,
            max_model_len=model.max_model_len,
            has_linear=hypic.traits.has_linear,
            has_attention=hypic.traits.has_attention,
            limits=hypic.limits(),
            deadline_s=parallel.deadline_s,
            quadratic=hypic.quadratic,
            shared_tiers=tuple(hypic.shared_tiers),
        )

    def _tenant(self, salt: str | None) -> str:
        """A tenant's name wherever its salt itself should not stand."""
        return self.hypic.namespace.scoped(salt=salt, lora=None).digest

    def _pool_numbers(self) -> dict[str, float]:
        directory = self.hypic.directory
        return {
            "bytes_used": self.hypic.pool_bytes_used,
            "bytes_budget": self.hypic.geometry.nbytes,
            "objects": len(directory),
            "pinned": len(directory.kept),
        }

    def add_request(self, request: Request) -> None:
        self._ran = True
        if request.request_id not in self.requests and request.prompt_token_ids is not None:
            command = _take_command(request)
            if command is not None and not isinstance(command, Compile):
                self._answer(request, command)
                super().add_request(request)
                return
            try:
                ask = _ask(request)
                plan, transfer = self.hypic.plan(ask), self.hypic.transfer(ask)
                if transfer.push_to is not None and (plan is None or not plan.warm_only):
                    raise LinkError(f"{PUSH_TO}: expected a prompt that ends in a separator")
            except (LinkError, PromptError) as e:
                # The front end refuses these with HTTP 400; a client that talks to the engine core
                # directly gets an error finish, the engine lives on.
                logger.error("request %s refused: %s", request.request_id, e)
                _replace_tokens(request, [0], request.cache_salt)
                self._end_unrun(request, RequestStatus.FINISHED_ERROR)
            else:
                if isinstance(command, Compile):
                    self._answer_compile(request, command, plan)
                if plan is not None:
                    self._adopt(request, plan, transfer)
        super().add_request(request)

    def _answer(self, request: Request, command: AnyCommand | Failure) -> None:
        """Execute a command and end its request."""
        answer = command if isinstance(command, Failure) else self._desk.execute(command, request.cache_salt)
        self._answers[request.request_id] = lambda: answer
        self._end_unrun(request, RequestStatus.FINISHED_STOPPED)

    def _answer_compile(self, request: Request, command: Compile, plan: PromptPlan | None) -> None:
        """The request is a warm-up prompt of one segment; it is given its id when it ends."""
        pieces = split_ids(request.prompt_token_ids or [], self.hypic.ids)
        [tokens] = (piece for piece in pieces if not isinstance(piece, Marker))
        key = plan.segments[0].key if plan is not None and plan.segments else None
        salt = request.cache_salt  # _adopt will change it
        self._answers[request.request_id] = lambda: self._desk.compiled(command, tokens, key, salt)

    def _adopt(self, request: Request, plan: PromptPlan, transfer: Transfer) -> None:
        """Make the plan's stream the request's tokens."""
        if plan.warm_only:
            self._end_unrun(request, RequestStatus.FINISHED_STOPPED)
        salt = request.cache_salt
        if plan.salt is not None:
            salt = f"hypic:{self._secret}:{plan.salt}:{self._tenant(salt)}"
        if request.skip_reading_prefix_cache:
            # vLLM ignores a connector's "not yet" for such requests; a salt of its own has the same effect.
            request.skip_reading_prefix_cache = False
            salt = f"hypic:{self._secret}:unshared:{request.request_id}"
        # A warm-up prompt may have nothing to compute; it is never scheduled, but vLLM wants a token.
        stream = list(plan.stream) or [plan.segments[-1].tokens[-1]]
        _replace_tokens(request, stream, salt)
        room = self.max_model_len - plan.n_logical
        request.max_tokens = max(1, min(request.max_tokens, room))
        if request.sampling_params is not None:
            request.sampling_params.min_tokens = min(request.sampling_params.min_tokens, request.max_tokens)
        if plan.segments or plan.salt is not None:
            self.hypic.admit(request.request_id, plan, transfer)

    def _end_unrun(self, request: Request, status: RequestStatus) -> None:
        """End the request with ``status`` once its records are resident; it is never scheduled."""
        self._ending[request.request_id] = status
        self.hypic.hold(request.request_id)

    def _finish_ending(self) -> list[tuple[EngineCoreOutput, int]]:
        """Finish the unrun requests whose records are resident, and delivered; their outputs and clients."""
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
            answer = self._answers.pop(request_id, None)
            if request is not None:
                params = None if answer is None else pack(answer())
                if self.finish_requests(request_id, status):
                    reason = request.get_finished_reason()
                    output = EngineCoreOutput(request_id, [], finish_reason=reason, kv_transfer_params=params)
                    finished.append((output, request.client_index))
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._ran or not self.hypic.awaiting:
            self._naps.over()
        else:
            self._naps.take(sound=self.hypic.only_receiving)
        for job in self.hypic.pump():
            super().add_request(self._segment_request(job))
        output = super().schedule(*args, **kwargs)
        self._publish()
        self._ran = bool(output.total_num_scheduled_tokens)
        return output

    def _segment_request(self, job: SegmentJob) -> Request:
        owner = self.requests[job.for_request]
        return Request(
            request_id=job.request_id,
            prompt_token_ids=job.token_ids,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=True),
            pooling_params=None,
            client_index=owner.client_index,
            arrival_time=owner.arrival_time,
            lora_request=owner.lora_request,
            # Its KV was computed in isolation and serves nobody else.
            cache_salt=self._segment_salt,
            priority=owner.priority,
            block_hasher=owner._block_hasher,
        )

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args: Any) -> int:
        """Stock ends prefill chunks where states are kept for its prefix cache, at the price of a step for
        the rest of the prompt.  Nobody resumes from a segment request's states: it is not split."""
        if request.cache_salt == self._segment_salt:
            return num_new_tokens
        return super()._mamba_block_aligned_split(request, num_new_tokens, *args)

    def _free_request_blocks(self, request: Request) -> None:
        """A segment request's blocks leave the prefix cache, instead of pushing useful ones out of it."""
        if request.cache_salt == self._segment_salt:
            groups = self.kv_cache_manager.get_block_ids(request.request_id)
            self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
        super()._free_request_blocks(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # A request that ends in this step is forgotten by the time its output is built.
        internal = {r for r in scheduler_output.num_scheduled_tokens if self.hypic.is_internal(r)}
        hits = {r: self.hypic.hit_tokens(r) for r in scheduler_output.num_scheduled_tokens}
        plans = {r: p for r in hits if (p := self.hypic.plan_of(r)) is not None}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for core_outputs in outputs.values():
            core_outputs.outputs = [o for o in core_outputs.outputs if o.request_id not in internal]
            for output in core_outputs.outputs:
                if output.prefill_stats is not None and output.request_id in plans:
                    _count_reuse(output, plans[output.request_id], hits[output.request_id])
        for output, client in self._finish_ending():
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._publish()
        return outputs

    def shutdown(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        super().shutdown()


def _take_command(request: Request) -> AnyCommand | Failure | None:
    """Take the command of the cache API, if any, out of the request: what remains is an ordinary one."""
    params = request.sampling_params
    if params is None or not params.extra_args or COMMAND not in params.extra_args:
        return None
    try:
        return command_of(params.extra_args)
    except ValueError as e:
        return Failure(400, str(e))
    finally:
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != COMMAND}


def _ask(request: Request) -> Ask:
    params = request.sampling_params
    return Ask(
        token_ids=request.prompt_token_ids or [],
        extra_args=None if params is None else params.extra_args,
        salt=request.cache_salt,
        lora=None
        if request.lora_request is None
        else f"{request.lora_request.lora_name}:{request.lora_request.lora_path}",
    )


def _replace_tokens(request: Request, tokens: list[int], salt: str | None) -> None:
    """Give a request that was never scheduled other prompt tokens.

    ``all_token_ids`` is a view of the same list, so it is changed in place; block hashes are made anew.
    """
    request.prompt_token_ids = tokens
    request._all_token_ids[:] = tokens
    request.num_prompt_tokens = len(tokens)
    request.cache_salt = salt
    request.block_hashes = []
    request.update_block_hashes()


def _count_reuse(output: EngineCoreOutput, plan: PromptPlan, hit_tokens: int) -> None:
    """``usage.prompt_tokens_details.cached_tokens`` counts tokens read from records."""
    stats = output.prefill_stats
    assert stats is not None
    stats.num_external_cached_tokens += hit_tokens
    stats.num_cached_tokens += hit_tokens
    stats.num_prompt_tokens = plan.n_logical
    stats.num_computed_tokens = plan.n_logical - stats.num_cached_tokens


class HypicSyncScheduler(_HypicMixin):
    """Over vLLM's synchronous scheduler."""


class HypicAsyncScheduler(_HypicMixin, AsyncScheduler):
    """Over vLLM's asynchronous scheduler."""


class HypicScheduler:
    """Picks the variant when the engine core makes its scheduler: only then it is known whether
    asynchronous scheduling is on."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = HypicAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HypicSyncScheduler
        return chosen(vllm_config, *args, **kwargs)
