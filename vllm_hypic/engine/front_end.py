"""Checks requests in the front end, and refuses with a reason what position-independent caching cannot do."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from ..cache_api.commands import COMMAND, is_command
from ..cache_api.rewriting import forgotten
from ..config.engine import HypicConfig, config_of
from ..connector.build import primitive_ids_of
from ..connector.scheduler.planning import request_limits
from ..pool.families import family_in
from ..primitives.context import NONE_HERE
from ..primitives.options import PUSH_TO, SEGMENTS, RequestLimits, RequestSpec, parse_request
from ..primitives.pieces import PromptError, require_apart, require_whole
from ..primitives.policies import LinkError, ModelTraits
from ..primitives.segmenter import Spans
from ..primitives.tokens import PrimitiveIds
from ..segment_parallel.permits import Permits, Subject
from .media import MediaReader, placed, refused_media

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest


class RequestRefused(VLLMValidationError, ValueError):
    """A request that the plugin cannot honour; the server answers HTTP 400 with this message."""


class RequestChecker:
    """Checks the requests of one engine that runs the plugin; for one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.config: HypicConfig = config_of(vllm_config)

    @cached_property
    def primitives(self) -> PrimitiveIds:
        """Ids of the primitives; the first use loads the tokenizer."""
        return primitive_ids_of(self.vllm_config, self.config)

    @cached_property
    def _limits(self) -> RequestLimits:
        return request_limits(self.config)

    @cached_property
    def _traits(self) -> ModelTraits:
        return _traits(self.vllm_config)

    def check(self, request: EngineCoreRequest) -> RequestSpec:
        """Return the request's options.  Raises :class:`RequestRefused` unless the engine can honour the
        request, which stays unchanged.

        In a request without primitives or named segments, only the ``hypic_*`` options are checked.
        """
        if forgotten():
            raise RequestRefused(
                "vLLM takes this prompt from kv_transfer_params, or renders this model's chats without the "
                "tokenizer, so the request's parts and segment ids have no effect; use /v1/completions"
            )
        try:
            spec = self._spec(request)
        except LinkError as e:
            raise RequestRefused(str(e)) from e
        ids, spans, primitives = request.prompt_token_ids, spec.spans, self.primitives
        if spec.transfer.push_to is not None and not (ids and ids[-1] == primitives.sep):
            raise RequestRefused(f"{PUSH_TO}: expected a warm-up prompt, which ends in a separator")
        if ids is None or not (spans or primitives.contains(ids)):
            return spec
        if spans and primitives.contains(ids):
            raise RequestRefused(
                f"{SEGMENTS}: the prompt itself has separators or other primitives: remove them"
            )
        reason = refusal(request, primitives) or _refused_images(request, self.vllm_config, primitives, spans)
        if reason:
            what = SEGMENTS if spans else "prompts with segment separators"
            raise RequestRefused(f"{what}: {reason}")
        return spec

    def _spec(self, request: EngineCoreRequest) -> RequestSpec:
        """Parse and check the options of a request.  Raises ``LinkError``."""
        params, parallel = request.sampling_params, self.config.segment_parallel
        no_tokenizer = self.vllm_config.model_config.skip_tokenizer_init
        extra = None if params is None else _without_command(params.extra_args)
        if parallel is not None:
            Permits.read(parallel.secret_file).check(extra or {}, _subject(request))
        spec = parse_request(extra, len(request.prompt_token_ids or ()), self._limits, from_client=True)
        if spec.segment_mode != "off" and no_tokenizer:
            raise LinkError(
                f"hypic_segment_mode={spec.segment_mode!r} needs the tokenizer, but skip_tokenizer_init is "
                "set: expected 'off'"
            )
        if reason := spec.link.refused_by(self._traits):
            raise LinkError(reason)
        if spec.link.context == "learned" and self.config.learned is None:
            raise LinkError(NONE_HERE)
        if spec.link.reads_text and no_tokenizer:
            raise LinkError(
                f"hypic_context={spec.link.context!r} with islands {spec.link.islands} reads text, but "
                "skip_tokenizer_init disables the tokenizer: expected 'none' for both, or context 'lead'"
            )
        return spec


def _without_command(extra_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the extra arguments without a command of the cache API.
    A client's imitation of a command stays in, and is refused like any unknown option."""
    if extra_args is None or not is_command(extra_args.get(COMMAND)):
        return extra_args
    return {name: value for name, value in extra_args.items() if name != COMMAND}


def _subject(request: EngineCoreRequest) -> Subject:
    """Return the subject that a permit for this request must name."""
    lora = request.lora_request
    return Subject(
        request.prompt_token_ids or (), request.cache_salt, None if lora is None else lora.lora_name
    )


def refusal(request: EngineCoreRequest, primitives: PrimitiveIds) -> str | None:
    """Return why a prompt with segments cannot get what the request asks for, or ``None`` if it can."""
    params = request.sampling_params
    if params is None:
        return "pooling requests are not supported"
    if request.prompt_embeds is not None:
        return "prompt_embeds are not supported"
    if request.resumable:
        return "streaming input is not supported"
    if params.prompt_logprob_token_ids is not None:
        return "prompt_logprob_token_ids are not supported"
    markers = (primitives.sep, primitives.pdep, primitives.pad)
    if all(token in markers for token in request.prompt_token_ids or []):
        return "the prompt has no tokens besides separators, PDep and padding"
    return None


def _refused_images(
    request: EngineCoreRequest, vllm_config: VllmConfig, primitives: PrimitiveIds, spans: Spans
) -> str | None:
    """Return why the request's media cannot be in a prompt with segments; ``None`` if allowed or absent."""
    features = request.mm_features or ()
    if not features:
        return None
    if reason := refused_media(features, vllm_config):
        return reason
    # Media that the engine already has come without data, so they cannot be checked again here.
    here = [feature for feature in features if feature.data is not None]
    ids = request.prompt_token_ids or ()
    try:
        media = placed(features)
        require_whole(media, spans)
        require_apart(media, ids, primitives)
        MediaReader(vllm_config.model_config).of(here, ids)
    except PromptError as e:
        return str(e)
    return None


def reason_not_to_cut(request: EngineCoreRequest, primitives: PrimitiveIds) -> str | None:
    """Return why no mode may cut a prompt that names no segments, or ``None`` if a mode may cut it."""
    if request.mm_features and not primitives.contains(request.prompt_token_ids or ()):
        return (
            "hypic_segment_mode does not cut prompts with images, videos or audio: "
            "mark their segments with separators or hypic_segment_ranges"
        )
    params = request.sampling_params
    if params is not None and params.prompt_logprobs is not None:
        return "prompt_logprobs (or echo with logprobs) are null for tokens of segments"
    return refusal(request, primitives)


def _traits(vllm_config: VllmConfig) -> ModelTraits:
    model = vllm_config.model_config
    family = family_in(model.architecture)
    return ModelTraits(
        has_linear=model.is_hybrid or model.is_attention_free,
        has_transition=family is None or family.geometry.has_transition,
    )
