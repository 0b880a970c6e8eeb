"""Methods to answer the same prompt, with the request's options for each method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..config.engine import AUTO
from ..harness.engine_calls import Ask
from ..primitives.options import CONTEXT, ISLANDS, LINK, SEAM, SEGMENT, LinkDefaults
from ..primitives.policies import LinkMethod, parse_link
from .task import Prompt


@dataclass(frozen=True)
class Method:
    """A method; with ``link`` ``None`` the prompt is ordinary, and no segment of the prompt is reused."""

    reads_prefix_cache: ClassVar[bool] = False
    """Whether requests read vLLM's prefix cache; records are read anyway."""

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
            fresh=not self.reads_prefix_cache,
            forced=forced,
            parts=(prompt.head, *prompt.documents, prompt.question) if self.mode == "structure" else (),
        )

    def earlier(self, prompt: Prompt, index: int) -> Prompt:
        """Return the prompt that is asked before ``prompt``, whose cached data ``prompt`` finds.

        ``prompt`` is number ``index`` of a batch.
        """
        return prompt

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
"""Nothing is reused."""
