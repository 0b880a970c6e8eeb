"""Methods that only the evaluation compares, and the names of methods on the command line."""

from __future__ import annotations

import re

from vllm_hypic.eval.methods import FULL, Method
from vllm_hypic.eval.task import Prompt
from vllm_hypic.primitives.policies import CONTEXTS, LinkError, parse_link
from vllm_hypic.primitives.segmenter import SEGMENT_MODES

from ..lib.prompts import Writer


class PrefixCaching(Method):
    """Reuse by vLLM's prefix cache after a request with the same documents."""

    reads_prefix_cache = True


class PrefixCachingReordered(PrefixCaching):
    """The same, after another order of the documents; of two or more documents, another document is first."""

    def earlier(self, prompt: Prompt, index: int) -> Prompt:
        return prompt.reordered(Writer((), index).order(len(prompt.documents)), prompt.question)


PREFIX = PrefixCachingReordered("prefix caching")
PREFIX_SAME = PrefixCaching("prefix caching, same order")
"""Reuse by vLLM's prefix cache after the same order: full recompute's noise with a mostly cached prompt."""
PLAIN = {"full": FULL, "prefix": PREFIX, "prefix-same": PREFIX_SAME}
"""Methods without a link method, by their names on the command line."""
_OTHER_CHUNKS = f"{FULL.name}, chunks of "


def noise_name(chunk: int) -> str:
    """Return the name of full recompute on a stock engine whose ``max_num_batched_tokens`` is ``chunk``."""
    return f"{_OTHER_CHUNKS}{chunk}"


def is_noise(name: str) -> bool:
    return name.startswith(_OTHER_CHUNKS)


def link_method(text: str) -> Method:
    """Return the method that the command line calls ``text``.

    Names are ``hypic-8`` (seam window 8), ``naive-8``, ``epic-16``, ``epic-0``, ``block``, ``seam-4-0+4``,
    ``full``, ``prefix``, ``prefix-same``.  A context and islands follow behind slashes: ``hypic-8/lead``,
    ``hypic-8/text/query-10``, ``hypic-8/query-10``.  The mode that finds segments follows behind an ``@``:
    ``hypic-8@cdc``, ``hypic-8/text@structure``.  Raises :class:`LinkError` that names a bad method.
    """
    if text in PLAIN:
        return PLAIN[text]
    method, at, mode = text.partition("@")
    if at and mode not in SEGMENT_MODES:
        raise LinkError(f"method {text!r}: expected one of {', '.join(SEGMENT_MODES)} after the @")
    base, *rest = method.split("/")
    if match := re.fullmatch(r"(hypic|naive)-(\d{1,4})", base):
        link, seam = match.group(1), int(match.group(2))
    else:
        link, seam = base, 0
        if base in ("hypic", "naive"):
            raise LinkError(f"method {text!r}: the seam window is missing; expected a name like {base}-8")
    context = rest.pop(0) if rest and rest[0] in CONTEXTS else "none"
    islands = rest.pop(0) if rest else "none"
    if rest:
        raise LinkError(f"method {text!r}: expected LINK, LINK/CONTEXT, LINK/ISLANDS or LINK/CONTEXT/ISLANDS")
    parse_link(link, seam, context, islands)
    return Method(text, link, seam, context, islands, mode if at else "off")


DEFAULT = (
    *("full", "prefix", "prefix-same", "naive-8", "block"),
    *("epic-0", "epic-2", "epic-8", "epic-16", "epic-32"),
    *("hypic-0", "hypic-4", "hypic-8", "hypic-16", "hypic-32"),
)
"""Methods that are compared by default."""
