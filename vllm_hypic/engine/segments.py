"""Finds segments of requests without separators in the front end, and tells the scheduler where they are."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from ..cache_api.commands import COMMAND
from ..config.engine import CONNECTOR, HypicConfig, config_of
from ..connector.build import primitive_ids_of
from ..primitives.options import SEGMENTS, link_of_request, segment_mode_of_request
from ..primitives.places import pattern
from ..primitives.segmenter import Segmenter
from ..primitives.token_texts import TokenTexts
from ..primitives.tokens import PrimitiveIds
from .front_end import refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest


class SegmentFinder:
    """Finds the segments of one engine's requests, in its front end; for one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._ours = transfer is not None and transfer.kv_connector == CONNECTOR
        self._vllm_config = vllm_config

    def find(self, request: EngineCoreRequest) -> None:
        """Write the segments of a checked request into its extra arguments, unless it names them itself, has
        separators, or asks for something that only plain requests get."""
        params, ids = request.sampling_params, request.prompt_token_ids
        if not self._ours or params is None or ids is None:
            return
        extra = params.extra_args or {}
        if COMMAND in extra or SEGMENTS in extra:
            return
        config = self._config
        mode = segment_mode_of_request(extra, config.segment.mode)
        if mode == "off" or not link_of_request(extra, config.link_defaults).reuse:
            return
        if self._primitives.contains(ids) or refusal(request, self._primitives) is not None:
            return
        if spans := self._segmenter.spans(ids, mode):
            params.extra_args = {**extra, SEGMENTS: list(chain.from_iterable(spans))}

    @cached_property
    def _config(self) -> HypicConfig:
        return config_of(self._vllm_config)

    @cached_property
    def _primitives(self) -> PrimitiveIds:
        return primitive_ids_of(self._vllm_config, self._config)

    @cached_property
    def _segmenter(self) -> Segmenter:
        from vllm.tokenizers import cached_tokenizer_from_config

        options = self._config.segment
        tokenizer = cached_tokenizer_from_config(self._vllm_config.model_config)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return Segmenter(
            TokenTexts(tokenizer).of,
            special.union(tokenizer.all_special_ids),
            [pattern(name) for name in options.patterns],
            min_tokens=options.min_tokens,
            mean_tokens=options.mean_tokens,
            query_tokens=options.query_tokens,
            max_segments=options.max_segments,
        )
