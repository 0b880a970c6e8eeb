"""Methods to answer the same prompt, with the request's options for each method."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..config.engine import AUTO
from ..harness.engine_calls import Ask
from ..harness.prompts import Prompt
from ..primitives.options import CONTEXT, ISLANDS, LINK, SEAM, SEGMENT, LinkDefaults
from ..primitives.policies import CONTEXTS, LinkError, LinkMethod, parse_link
from ..primitives.segmenter import SEGMENT_MODES


@dataclass(frozen=True)
class Method:
    """A method; with ``link`` ``None`` the prompt is ordinary, and no segment of the prompt is reused."""

    name: str
    link: str | None = None
    seam: int = 0
    """Seam window in tokens, for ``hypic`` and ``naive`` only."""
    context: str = "none"
    islands: str = "none"
    """Islands; ``auto``, also as ``context``, stands for the engine's default: see :meth:`on`."""
    mode: str = "off"
    """Mode that finds segments; with ``off`` segments stand between separators."""

    def on(self, defaults: LinkDefaults | None) -> Method:
        """Return this method with the defaults of an engine in place of ``auto``."""
        if defaults is None or AUTO not in (self.context, self.islands):
            return self
        context = defaults.context if self.context == AUTO else self.context
        islands = defaults.islands if self.islands == AUTO else self.islands
        named, at, mode = self.name.partition("@")
        link = named.partition("/")[0]
        name = "/".join([link, *(part for part in (context, islands) if part != "none")]) + at + mode
        return replace(self, name=name, context=context, islands=islands)

    @property
    def linked(self) -> LinkMethod | None:
        """Return the link method, or ``None`` for an ordinary prompt."""
        if self.link is None:
            return None
        return parse_link(self.link, self.seam, self.context, self.islands)

    @property
    def records(self) -> Method:
        """Return the method without name and islands: methods that are equal then read the same records."""
        return self if self.link is None else replace(self, name="", islands="none")

    def ask(
        self,
        prompt: Prompt,
        separator: int,
        *,
        max_tokens: int,
        logprobs_of: list[int] | None,
        forced: tuple[int, ...] = (),
    ) -> Ask:
        """Return the request for a prompt.

        ``logprobs_of``: tokens whose logprobs are compared, at the first position; ``forced``: the answer
        whose likelihood is measured.
        """
        separated = self.link is not None and self.mode == "off"
        tokens = prompt.marked(separator) if separated else prompt.plain()
        extra: dict[str, str | int] = {}
        if self.link is not None:
            extra = {LINK: self.link, SEAM: self.seam, CONTEXT: self.context, ISLANDS: self.islands}
            extra[SEGMENT] = self.mode
        return Ask(
            tokens,
            max_tokens,
            logprobs_of=logprobs_of,
            extra=extra,
            ignore_eos=False,
            fresh=self not in (PREFIX, PREFIX_SAME),
            forced=forced,
            parts=(prompt.head, *prompt.documents, prompt.question) if self.mode == "structure" else (),
        )

    def reusable(self, prompt: Prompt, least: int) -> int:
        """Return the tokens that surely come from records; ``least``: tokens that a record needs."""
        if (link := self.linked) is None:
            return 0
        head = len(prompt.head) if len(prompt.head) >= least else 0
        inside = [len(d) - link.head - link.tail for d in prompt.documents]
        served = sum(n for n in inside if n >= least)
        islands = 0 if link.islands is None else link.islands.budget(served)
        return head + served - islands


FULL = Method("full recompute")
PREFIX = Method("prefix caching")
"""Reuse by vLLM's prefix cache after a request with the same documents in another order."""
PREFIX_SAME = Method("prefix caching, same order")
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
