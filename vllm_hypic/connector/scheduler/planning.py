"""Plans of requests: a pure function of the prompt, the request's options and the size of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...config.engine import HypicConfig
from ...pool.geometry import PoolGeometry
from ...pool.plans import Space
from ...primitives.context import NONE_HERE, LearnedContext
from ...primitives.islands import Ranges, choose_islands
from ...primitives.keys import Namespace, Role
from ...primitives.media import Media
from ...primitives.options import RequestLimits, RequestSpec, parse_request
from ...primitives.pieces import cut_prompt, parse_prompt
from ...primitives.plan import CachedSegment, PoolLimits, PromptPlan, build_plan
from ...primitives.policies import LinkError, ModelTraits
from ...primitives.prefix import build_prefix_plan
from ...primitives.tokens import PrimitiveIds
from ...primitives.windows import Words
from ...segment_parallel.description import Description
from ...store.protocol import CacheValue
from ...store.shared import shared_tiers
from .directory import SegmentDirectory
from .entries import Need

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class PlanRequest:
    """The planner's view of a request.  ``media``: called only if the prompt is cut; returns the prompt's
    images, by indices of ``token_ids``, or raises :class:`~...primitives.pieces.PromptError`.
    ``may_record_prefix``: called only without segments; whether the prompt's prefix may become a record."""

    token_ids: list[int]
    spec: RequestSpec
    salt: str | None
    lora: str | None
    media: Callable[[], Media] = tuple
    may_record_prefix: Callable[[], bool] = bool


def _no_tokenizer() -> Any:
    raise LinkError("context 'text' and islands need a tokenizer, which this engine does not have")


@dataclass(frozen=True)
class PlanningTexts:
    """Texts that planning gets from the model's tokenizer, when a request first needs them.

    ``context``: returns the token ids of the context ``text``; ``words``: returns the words that choose
    islands.  Without a tokenizer both raise ``LinkError``.  ``learned``: the engine's learned context, which
    needs no tokenizer.
    """

    context: Callable[[], tuple[int, ...]] = _no_tokenizer
    words: Callable[[], Words] = _no_tokenizer
    learned: LearnedContext | None = None


NO_TOKENIZER = PlanningTexts()


def request_limits(config: HypicConfig) -> RequestLimits:
    """Return the defaults and limits of an engine for the options of its requests."""
    parallel = config.segment_parallel
    return RequestLimits(
        config.link_defaults,
        config.segment.mode,
        None if parallel is None else parallel.deadline_s,
        shared_tiers(config.store),
    )


class Planner:
    """Plans the requests of one engine.

    ``prefill_flops(tokens)``: FLOPs of a segment's prefill.  ``directory``: only its size matters, and the
    room of records pinned by users, which no plan may use.  ``reads_successors``: some layers read each
    token's successor, too.
    """

    def __init__(
        self,
        config: HypicConfig,
        geometry: PoolGeometry,
        namespace: Namespace,
        max_model_len: int,
        primitive_ids: Callable[[], PrimitiveIds],
        prefill_flops: Callable[[int], float],
        directory: SegmentDirectory,
        texts: PlanningTexts = NO_TOKENIZER,
        reads_successors: bool = False,
    ) -> None:
        self._config, self._geometry = config, geometry
        self.namespace = namespace
        """Namespace and generation of the records that new requests use."""
        self._max_model_len = max_model_len
        self._primitive_ids = primitive_ids
        self._ids: PrimitiveIds | None = None
        self._prefill_flops = prefill_flops
        self._directory = directory
        # A plan must also fit its tenant's share: otherwise the request could never be admitted.
        share = min(config.max_request_fraction, config.max_tenant_fraction)
        self.request_share = directory.total.part(share)
        """The part of the pool that one request may take."""
        self._context = cache(texts.context)
        self.learned = texts.learned
        self._words = cache(texts.words)
        self.reads_successors = reads_successors
        self.shared_tiers = tuple(shared_tiers(config.store))
        """Identities of the tiers that other engines use, too, the fastest first."""
        self._request_limits = request_limits(config)

    @property
    def ids(self) -> PrimitiveIds:
        """Ids of the primitives; the tokenizer is loaded at the first request."""
        if self._ids is None:
            self._ids = self._primitive_ids()
        return self._ids

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens of the context ``text``."""
        return self._context()

    @property
    def traits(self) -> ModelTraits:
        geometry = self._geometry
        return ModelTraits(
            has_linear=bool(geometry.linear),
            has_transition=any(layer.has_transition for layer in geometry.linear),
        )

    def plan(self, request: PlanRequest) -> PromptPlan | None:
        """Plan a request; return ``None`` if it has no primitives and no segments.  Changes nothing.

        Raises ``LinkError`` or ``PromptError`` if the request asks for something impossible.
        """
        ids, spec, config = request.token_ids, request.spec, self._config
        marked = self.ids.contains(ids)
        spans = () if marked else spec.spans
        if not marked and not spans:
            return None
        method = spec.link
        if spans and not method.reuse:
            return None  # vLLM computes the request as any ordinary one
        if reason := method.refused_by(self.traits):
            raise LinkError(reason)
        media = request.media()
        return build_plan(
            cut_prompt(ids, spans, media) if spans else parse_prompt(ids, self.ids, media),
            method,
            self.namespace.scoped(salt=request.salt, lora=request.lora),
            self._limits(self._unkept),
            min_segment_tokens=config.min_segment_tokens,
            kept=self._directory.kept,
            most=self._limits(self.request_share),
            context=self.tokens_behind(method.context),
            learned="" if self.learned is None else self.learned.digest,
            choose_islands=None if method.islands is None else self._choose_islands,
            find_question=None if method.islands is None else self._words().question_in,
            checkpoint_tokens=config.checkpoint_tokens,
            reads_successors=self.reads_successors,
        )

    def plan_prefix(self, request: PlanRequest) -> PromptPlan | None:
        """Plan a request without segments whose prefix the pool should cache; return ``None`` if the pool
        caches no prefixes, or this one is too short.  Changes nothing.  Raises ``LinkError``."""
        config, method = self._config, request.spec.link
        if config.prefix == "stock" or not method.reuse:
            return None
        return build_prefix_plan(
            request.token_ids,
            method,
            self.namespace.scoped(salt=request.salt, lora=request.lora),
            self._limits(self._unkept),
            least_tokens=config.min_segment_tokens,
            kept=self._directory.kept,
            most=self._limits(self.request_share),
            reads_successors=self.reads_successors,
        )

    def tokens_behind(self, context: str) -> tuple[int, ...]:
        """Return the tokens of a fixed context; empty for all other contexts.  Raises ``LinkError`` if the
        engine lacks the context."""
        if context == "learned":
            if self.learned is None:
                raise LinkError(NONE_HERE)
            return self.learned.tokens
        return self.context if context == "text" else ()

    def _choose_islands(
        self, interiors: Sequence[tuple[int, ...]], query: tuple[int, ...], budget: int
    ) -> list[Ranges]:
        return choose_islands(interiors, query, budget, self._words())

    def spec(self, extra_args: Mapping[str, Any] | None, n_tokens: int) -> RequestSpec:
        """Parse the options of a request that the front end has checked.  Raises ``LinkError``."""
        return parse_request(extra_args, n_tokens, self._request_limits, from_client=False)

    def limits(self) -> PoolLimits:
        """Return the limits of a request without kept records."""
        return self._limits(self._unkept.least(self.request_share))

    @property
    def _unkept(self) -> Space:
        """The space of the pool without the space of kept records."""
        return self._directory.total - self._directory.kept_space()

    def _limits(self, room: Space) -> PoolLimits:
        return PoolLimits(
            room.pages if self._geometry.attention else _UNLIMITED,
            room.slots,
            self._geometry.page_tokens,
            self._max_model_len - 1,
            room.transition_blocks,
            self._geometry.record_transition_blocks,
            self._geometry.state_pages,
        )

    def need(self, segment: CachedSegment, stop: int | None = None, behind: int = 0) -> Need:
        """Return the need and the value of a segment's record.  The record needs at most one transition block
        per head of every linear layer; a leading segment needs none, as no tokens stand before it.

        ``stop``: for a checkpoint, the number of the segment's tokens before it; it shares the record's
        pages.  ``behind``: for a prefix, the number of first tokens that another record shares; only later
        tokens count in the record's own value.
        """
        leading = segment.role is Role.LEADING
        blocks = 0 if leading else self._geometry.record_transition_blocks
        end = segment.stop if stop is None else stop
        need = Need(end - segment.head, blocks)
        space = self._directory.space_for(need)
        if segment.is_prefix:
            return self._prefix_need(need, end, behind)
        own = space if stop is None else space - Space(self._directory.pages_for(need.columns))
        value = CacheValue(need.columns, self._prefill_flops(end), self._geometry.bytes_of(own))
        return replace(need, hit_value=value, has_scratch_slot=stop is None and segment.has_scratch_slot)

    def need_grown(self, columns: int, behind: int) -> Need:
        """Return the need and the value of a prefix's record of ``columns`` tokens; see :meth:`need`."""
        return self._prefix_need(Need(columns), columns, behind)

    def _prefix_need(self, need: Need, stop: int, behind: int) -> Need:
        space, saved = self._directory.space_for(need), self._prefill_flops(stop)
        others = Space(self._directory.pages_for(behind))
        nbytes = self._geometry.bytes_of(space - others)
        own = CacheValue(stop - behind, saved - self._prefill_flops(behind), nbytes)
        return replace(need, hit_value=CacheValue(stop, saved, self._geometry.bytes_of(space)), own=own)

    @property
    def quadratic(self) -> float:
        """Attention's part in a prefill: n tokens take FLOPs in proportion to ``n + quadratic * n^2``."""
        n = 4096
        once, twice = self._prefill_flops(n), self._prefill_flops(2 * n)
        square = (twice - 2 * once) / (2 * n * n)
        return max(0.0, square / (once / n - square * n))

    def describe(
        self, instance: str, models: tuple[str, ...], max_model_len: int, ranks: int
    ) -> Description | None:
        """Return the description of the engine ``instance``, from which routers plan prompts as this planner
        does; ``None`` without segment parallelism.

        ``models``: names under which the engine serves its model.  ``ranks``: number of workers.
        """
        config = self._config
        if (parallel := config.segment_parallel) is None:
            return None
        ids, traits = self.ids, self.traits
        return Description(
            instance=instance,
            models=models,
            namespace=self.namespace.digest,
            generation=self.namespace.generation,
            receiver=parallel.receiver_url,
            events=parallel.events_url,
            ranks=ranks,
            separator=ids.sep,
            pdep=ids.pdep,
            pad=ids.pad,
            link=config.link,
            seam_tokens=config.seam_tokens,
            context=config.context,
            islands=config.islands,
            context_tokens=self.tokens_behind(config.context),
            learned="" if self.learned is None else self.learned.digest,
            min_segment_tokens=config.min_segment_tokens,
            checkpoint_tokens=config.checkpoint_tokens,
            reads_successors=self.reads_successors,
            max_model_len=max_model_len,
            has_linear=traits.has_linear,
            has_transition=traits.has_transition,
            limits=self.limits(),
            deadline_s=parallel.deadline_s,
            quadratic=self.quadratic,
            shared_tiers=self.shared_tiers,
            literal_text=config.token_texts.literal,
        )
