"""Checks requests and finds their segments in the front end, and tells the scheduler their places."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache_api.commands import COMMAND, Explain
from ..config.engine import SegmentingConfig, own_options
from ..primitives.options import FOUND, FoundSegments, RequestSpec
from ..primitives.places import pattern
from ..primitives.segmenter import Found, Segmenter
from ..primitives.structure import locate
from ..primitives.token_texts import REPLACEMENT, TokenTexts, special_tokens
from ..primitives.tokens import PrimitiveIds
from .front_end import RequestChecker, reason_not_to_cut
from .renderer import CHAT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Names of one-byte tokens in vocabularies whose other tokens are characters."""


class SegmentFinder:
    """Finds the segments of one engine's requests, in its front end; for one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        ours = own_options(vllm_config.kv_transfer_config) is not None
        self._checker = RequestChecker(vllm_config) if ours else None

    def receive(self, request: EngineCoreRequest, prompt: Any) -> None:
        """Check a request, and find its segments; see :meth:`.RequestChecker.check` and :meth:`find`.  In an
        engine without the plugin, every request stays unchanged."""
        if self._checker is not None:
            self.find(request, self._checker.check(request), self._checker.primitives, prompt)

    def find(
        self, request: EngineCoreRequest, spec: RequestSpec, primitives: PrimitiveIds, prompt: Any
    ) -> None:
        """Write the segments of a checked request into its extra arguments, as a message to the scheduler.

        Requests that name segments or have separators stay unchanged, as do requests for results that
        segments would take away.  ``prompt``: the request's engine input of :class:`.renderer.HypicRenderer`.
        """
        params, ids = request.sampling_params, request.prompt_token_ids
        if params is None or ids is None or spec.named is not None:
            return
        if spec.segment_mode == "off" or not spec.link.reuse:
            return
        command = (params.extra_args or {}).get(COMMAND)
        if not (command is None or isinstance(command, Explain)):
            return
        if primitives.contains(ids) or reason_not_to_cut(request, primitives):
            return
        found = self.found(ids, spec.segment_mode, prompt)
        message = FoundSegments(spec.segment_mode, found.spans, found.counts).packed()
        params.extra_args = {**(params.extra_args or {}), FOUND: message}

    def found(self, ids: list[int], mode: str, prompt: Any) -> Found:
        """Return the segments of a prompt, found by any mode but ``off``."""
        return self._segments.found(ids, mode, prompt)

    @cached_property
    def _segments(self) -> PromptSegments:
        from vllm.tokenizers import cached_tokenizer_from_config

        assert self._checker is not None
        tokenizer = cached_tokenizer_from_config(self._checker.vllm_config.model_config)
        return PromptSegments(Vocabulary(tokenizer), self._checker.config.segment)


class Vocabulary:
    """The data of a tokenizer that finding segments in its tokens needs; for one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self.special = special_tokens(tokenizer)
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


def segmenter_of(options: SegmentingConfig, texts: TokenTexts, special: Mapping[int, str]) -> Segmenter:
    """Return the segmenter for a tokenizer with these ``texts`` and ``special`` tokens."""
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


class TokenLengths:
    """Finds where tokens begin in the text they were made from, by each token's length in bytes of UTF-8,
    without decoding; for one thread.

    ``special``: ids of special tokens, whose names stand in prompts.
    """

    def __init__(self, tokenizer: Any, texts: TokenTexts, special: Collection[int]) -> None:
        self._tokenizer, self._texts, self._special = tokenizer, texts, special
        self._lengths = np.empty(0, np.int64)
        """Length in bytes of each token, by id; -1 for a token not looked up yet."""

    def starts(self, ids: Sequence[int], nbytes: int) -> memoryview | None:
        """Return where each token begins in a text of ``nbytes`` bytes, and the text's end.

        Returns ``None`` if the tokens' lengths do not add up to ``nbytes``.  The tokenizer then changed the
        text, or tokens were dropped or added.
        """
        tokens = np.asarray(array("q", ids))  # takes half the time of np.asarray(ids)
        if tokens.size and (missing := int(tokens.max()) + 1 - self._lengths.size) > 0:
            self._lengths = np.append(self._lengths, np.full(missing, -1))
        for token in np.unique(tokens[self._lengths[tokens] < 0]):
            self._lengths[token] = self._length(int(token))
        starts: Any = np.append(0, np.cumsum(self._lengths[tokens]))
        return memoryview(starts) if starts[-1] == nbytes else None

    def _length(self, token: int) -> int:
        if token in self._special:
            return len(self._tokenizer.decode([token], skip_special_tokens=False).encode())
        [text] = self._texts.of([token])
        if REPLACEMENT not in text:
            return len(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token)
        # A byte-level vocabulary writes a byte as a character.
        return 1 if _BYTE.fullmatch(name) else len(name)
