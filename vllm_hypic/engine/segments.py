"""Finds segments of requests without separators in the front end, and tells the scheduler their places."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from ..cache_api.commands import COMMAND, Explain
from ..config.engine import HypicConfig, SegmentingConfig, config_of, own_options
from ..connector.build import primitive_ids_of
from ..primitives.options import FOUND, SEGMENTS, link_of_request, segment_mode_of_request
from ..primitives.places import pattern
from ..primitives.segmenter import Found, Segmenter
from ..primitives.structure import locate
from ..primitives.token_texts import TokenTexts, special_ids
from ..primitives.tokens import PrimitiveIds
from .front_end import reason_not_to_cut
from .renderer import CHAT
from .token_lengths import TokenLengths

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest


class SegmentFinder:
    """Finds the segments of one engine's requests, in its front end; for one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._ours = own_options(vllm_config.kv_transfer_config) is not None
        self._vllm_config = vllm_config

    def find(self, request: EngineCoreRequest, prompt: Any) -> None:
        """Write the segments of a checked request, and counts of its pieces, into its extra arguments.

        Requests that name segments or have separators stay unchanged, as do requests for results that
        segments would take away.  ``prompt``: the request's engine input of :class:`.renderer.HypicRenderer`.
        """
        params, ids = request.sampling_params, request.prompt_token_ids
        if not self._ours or params is None or ids is None:
            return
        extra = dict(params.extra_args or {})
        command = extra.pop(COMMAND, None)
        if SEGMENTS in extra or not (command is None or isinstance(command, Explain)):
            return
        config = self._config
        mode = segment_mode_of_request(extra, config.segment.mode)
        if mode == "off" or not link_of_request(extra, config.link_defaults).reuse:
            return
        if self._primitives.contains(ids) or reason_not_to_cut(request, self._primitives):
            return
        found = self.found(ids, mode, prompt)
        params.extra_args = {**(params.extra_args or {}), FOUND: {"mode": mode, **found.counts}}
        if found.spans:
            params.extra_args[SEGMENTS] = list(chain.from_iterable(found.spans))

    def found(self, ids: list[int], mode: str, prompt: Any) -> Found:
        """Return the segments of a prompt, found by any mode but ``off``."""
        return self._segments.found(ids, mode, prompt)

    @cached_property
    def _config(self) -> HypicConfig:
        return config_of(self._vllm_config)

    @cached_property
    def _primitives(self) -> PrimitiveIds:
        return primitive_ids_of(self._vllm_config, self._config)

    @cached_property
    def _segments(self) -> PromptSegments:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(self._vllm_config.model_config)
        return PromptSegments(Vocabulary(tokenizer), self._config.segment)


class Vocabulary:
    """The data of a tokenizer that finding segments in its tokens needs; for one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self.special = special_ids(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self.lengths = TokenLengths(tokenizer, self.texts, self.special)


class PromptSegments:
    """Finds the segments of prompts by the options of section ``segment``; for one thread."""

    def __init__(self, vocabulary: Vocabulary, options: SegmentingConfig) -> None:
        self._vocabulary, self._min_tokens = vocabulary, options.min_tokens
        self._segmenter = segmenter_of(options, vocabulary.texts, vocabulary.special)

    def found(self, ids: list[int], mode: str, prompt: Any) -> Found:
        """Return the segments of ``prompt``, an engine input, found by any mode but ``off``."""
        if mode != "structure":
            return self._segmenter.find(ids, mode)
        chat = prompt.get(CHAT) if isinstance(prompt, Mapping) else None
        if chat is None:
            return self._segmenter.find(ids, "text")
        text = b""
        starts: Any = None
        if isinstance(rendered := prompt.get("prompt"), str):  # chats tokenised while rendered have no text
            text = rendered.encode(errors="surrogatepass")
            starts = self._vocabulary.lengths.starts(ids, len(text))
        if starts is None:
            texts = [token.encode() for token in self._vocabulary.texts.of(ids)]
            text, starts = b"".join(texts), [0, *accumulate(map(len, texts))]
        return self._segmenter.find_structure(ids, locate(chat, text, starts, self._min_tokens))


def segmenter_of(options: SegmentingConfig, texts: TokenTexts, special: Collection[int]) -> Segmenter:
    """Return the segmenter for a tokenizer with these ``texts`` and ``special`` ids."""
    return Segmenter(
        texts.of,
        special,
        [pattern(name) for name in options.patterns],
        min_tokens=options.min_tokens,
        mean_tokens=options.mean_tokens,
        query_tokens=options.query_tokens,
        newest_tokens=options.newest_tokens,
        max_segments=options.max_segments,
    )
