"""Sends commands of the cache API from an API server's process to the scheduler."""

from __future__ import annotations

import asyncio
import uuid
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ..config.engine import config_of, own_options
from ..connector.build import primitive_ids_of
from ..primitives.token_texts import SPECIAL, TokenTexts
from ..segment_parallel.description import Description
from .answers import CacheStats, Explanation, Segment, SegmentPage, Weights
from .commands import (
    COMMAND,
    MOST_IDS,
    MOST_RESOLVED,
    AnyCommand,
    Change,
    Compile,
    Delete,
    Describe,
    Explain,
    Failure,
    Resolve,
    Resolved,
    unpack,
)
from .forms import Seal
from .replicas import joined

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest

    from ..primitives.tokens import PrimitiveTexts

_Wanted = TypeVar("_Wanted", Segment, SegmentPage, Resolved, CacheStats, Description, Weights, Explanation)


class CommandFailed(Exception):
    """The engine refused a command, or gave no answer; ``status`` is the HTTP status for the client."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.status, self.message, self.segment_id = failure.status, failure.message, failure.id


def unsupported(engine: EngineClient) -> str | None:
    """Return why this engine takes no commands, or ``None`` if it does."""
    config = engine.vllm_config
    if own_options(config.kv_transfer_config) is None:
        return "the server runs without --attention-backend hypic"
    if config.model_config.skip_tokenizer_init:
        return "the server runs without a tokenizer (--skip-tokenizer-init)"
    parallel = config.parallel_config
    for name in ("data_parallel_external_lb", "data_parallel_hybrid_lb"):
        if getattr(parallel, name) and parallel.data_parallel_size > 1:
            return (
                f"{name} with data_parallel_size={parallel.data_parallel_size}: this server does not reach "
                "all replicas; let vLLM balance the load, or run servers without data parallelism"
            )
    return None


class Control:
    """An API server's connection to its engine; several API servers may share the engine, which owns the ids.

    Each data-parallel engine executes every command, so that any engine may get a request.  The first engine
    executes a command before all others and chooses a segment's id, so that concurrent commands agree.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._replicas: int = engine.vllm_config.parallel_config.data_parallel_size
        self.config = config_of(engine.vllm_config)
        self.max_model_len: int = engine.vllm_config.model_config.max_model_len
        self.ids = primitive_ids_of(engine.vllm_config, self.config)
        self.literal = self.config.token_texts.literal
        self._tokenizer: Any = engine.renderer.get_tokenizer()
        self.max_chars_per_token: int = self._tokenizer.max_chars_per_token
        # A command needs a prompt: any token that is no primitive will do.
        self._nothing = [next(t for t in range(4) if self.ids.marker(t) is None)]

    @property
    def max_segment_tokens(self) -> int:
        """Return the longest segment's tokens: two separators and one generated token must fit, too."""
        return self.max_model_len - 3

    def texts(self, seal: Seal) -> PrimitiveTexts:
        """Return the texts that stand for primitives in the prompts of a request."""
        return seal.texts(self.ids) if self.literal else self.config.token_texts

    async def compile(self, command: Compile, tokens: list[int], salt: str | None) -> Segment:
        """Warm and return a segment, once the pool holds the record.  Raises :class:`CommandFailed`."""
        before = [] if command.place.leading else [self.ids.sep]
        return await self._everywhere(command, Segment, _input([*before, *tokens, self.ids.sep], salt))

    async def send(self, command: AnyCommand, wanted: type[_Wanted], salt: str | None) -> _Wanted:
        """Return the scheduler's answer, one engine step later.  Raises :class:`CommandFailed`."""
        prompt = _input(self._nothing, salt)
        if isinstance(command, (Resolve, Describe)):
            return _unless_failed(await self._ask(command, wanted, prompt, replica=0))
        return await self._everywhere(command, wanted, prompt)

    async def _everywhere(self, command: AnyCommand, wanted: type[_Wanted], prompt: Any) -> _Wanted:
        """Let all replicas execute the command, also when the client disconnects meanwhile."""
        if self._replicas == 1:
            return _unless_failed(await self._ask(command, wanted, prompt))
        return _unless_failed(await asyncio.shield(self._of_replicas(command, wanted, prompt)))

    async def _of_replicas(
        self, command: AnyCommand, wanted: type[_Wanted], prompt: Any
    ) -> _Wanted | Failure:
        first = await self._ask(command, wanted, prompt, replica=0)
        known: str | None = None
        if isinstance(command, Compile):
            known = first.id if isinstance(first, (Segment, Failure)) else None
            if known is None:
                return first  # the segment has no id
            # A refused pin is not asked for on the other replicas.
            command = replace(command, id=known, pin=command.pin and not isinstance(first, Failure))
        elif isinstance(first, Failure) and not isinstance(command, Delete):
            return first
        others = await asyncio.gather(
            *(self._ask(command, wanted, prompt, replica=n) for n in range(1, self._replicas))
        )
        answer = first if isinstance(first, Failure) else joined(first, others)
        if isinstance(command, Compile) and command.pin and isinstance(answer, Failure):
            # A record must be pinned on every replica, or on none.
            assert known is not None
            unpin = Change(known, unpin=True)
            await self._of_replicas(unpin, Segment, _input(self._nothing, prompt.get("cache_salt")))
        return answer

    async def explain(self, prompt: Any, params: SamplingParams, lora: LoRARequest | None) -> Explanation:
        """Return the plan of the request with these arguments of ``generate``, and do not run the request.
        ``prompt``: an engine input with token ids.  Raises :class:`CommandFailed` and errors of vLLM."""
        params = params.clone()
        params.n, params.output_kind = 1, RequestOutputKind.FINAL_ONLY
        found = _unless_failed(await self._ask(Explain(), Explanation, prompt, params, lora))
        ids: list[int] = prompt["prompt_token_ids"]
        texts = self._token_texts.of(ids)
        for i, text in enumerate(texts):
            if text == SPECIAL:
                texts[i] = self._tokenizer.decode([ids[i]], skip_special_tokens=False) or text
        parts = [
            replace(part, runs=[replace(r, text="".join(texts[r.start : r.stop])) for r in part.runs])
            for part in found.parts
        ]
        return replace(found, parts=parts)

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self._tokenizer)

    async def resolve(self, ids: list[str], salt: str | None) -> Resolved:
        """Return the contents of distinct ids, or the first unknown ids, looked up over several engine steps.
        Raises :class:`CommandFailed`, also for more than ``MOST_IDS`` ids."""
        if len(ids) > MOST_IDS:
            raise CommandFailed(
                Failure(400, f"{len(ids)} segment ids in the request: expected at most {MOST_IDS}")
            )
        found = Resolved({}, [])
        while (done := len(found.contents)) < len(ids) and not found.unknown:
            more = await self.send(Resolve(ids[done : done + MOST_RESOLVED]), Resolved, salt)
            found = Resolved(found.contents | more.contents, more.unknown)
        return found

    async def _ask(
        self,
        command: AnyCommand,
        wanted: type[_Wanted],
        prompt: Any,
        params: SamplingParams | None = None,
        lora: LoRARequest | None = None,
        *,
        replica: int | None = None,
    ) -> _Wanted | Failure:
        """Return the answer of the engine ``replica``, or of an engine that vLLM chooses."""
        params = params or SamplingParams(
            max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # A command that the client forged stays in place, and the scheduler refuses it.
        params.extra_args = {COMMAND: command, **(params.extra_args or {})}
        last = None
        request_id = f"hypic-{type(command).__name__.lower()}-{uuid.uuid4().hex}"
        outputs = self.engine.generate(
            prompt, params, request_id, lora_request=lora, data_parallel_rank=replica
        )
        async for output in outputs:
            last = output
        if last is None or last.kv_transfer_params is None:
            ended = None if last is None else last.outputs[0].finish_reason
            return Failure(503, f"the engine ended the command without an answer (finish reason {ended!r})")
        return unpack(last.kv_transfer_params, wanted)


def _unless_failed(answer: _Wanted | Failure) -> _Wanted:
    if isinstance(answer, Failure):
        raise CommandFailed(answer)
    return answer


def _input(tokens: list[int], salt: str | None) -> Any:
    return tokens_input(tokens, cache_salt=salt)
