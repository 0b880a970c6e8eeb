"""Link methods: how a request joins independently cached segments.

A method decides, per interior segment, how many tokens at its head and tail are recomputed with
full context, and which windows between them (islands).  A method also decides the segment's context,
whether the transition ``T_C`` is applied, and whether the segment's position is part of its identity.  The
leading segment never has a seam: it stands at position 0 and has no left neighbour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_SEAM_TOKENS = 1024
"""Upper bound of a seam window: beyond it a segment is better recomputed as a whole."""

EPIC0_DUMMY_TOKENS = 4
"""EPIC's LegoLink-0 puts four dummy tokens before a segment at compile time and drops them."""

METHODS = (
    "hypic",
    "seam-<h>-<t>",
    "seam-<h>-<t>+<a>",
    "epic-<k>",
    "epic-0",
    "block",
    "prompt-cache",
    "naive",
    "full",
)

CONTEXTS = ("none", "lead", "text", "learned")
"""The context of a segment's record: nothing, the prompt's leading segment, a fixed text, or trained K and
V."""

ISLANDS = ("none", "query-<percent>", "query-<percent>-<tokens>")
MAX_ISLAND_PERCENT = 50
"""Upper bound of the share that islands recompute: beyond it a prompt is better recomputed as a whole."""
MAX_ISLAND_TOKENS = 4096


class LinkError(ValueError):
    """Raised for a link method or seam width that does not exist or that the model cannot honour."""


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model that a link method depends on."""

    has_linear: bool
    """Some layers carry a recurrent state (linear attention, SSM)."""
    has_transition: bool = True
    """A recurrent state keeps information across a segment, unlike a short convolution's state."""


@dataclass(frozen=True)
class Islands:
    """Windows inside segments that are recomputed with full context, the best for the query first.

    ``percent``: limit on their share of the tokens that records would serve.  ``tokens``: a larger limit for
    short prompts, up to :data:`MAX_ISLAND_PERCENT`.  A question's subject takes as many windows in a short
    prompt as in a long prompt.
    """

    percent: int
    tokens: int = 0

    def budget(self, served: int) -> int:
        """Return the most tokens that islands recompute of ``served`` tokens."""
        return max(served * self.percent // 100, min(self.tokens, served * MAX_ISLAND_PERCENT // 100))


@dataclass(frozen=True)
class LinkMethod:
    """One resolved link method.

    ``head`` and ``tail`` are the seam window of an interior segment in tokens.  ``dummies`` is the number of
    dummy tokens put before it at compile time, and ``anchor`` that of the leading segment's first tokens put
    there instead.  ``context`` (one of :data:`CONTEXTS`) is the record behind which it is computed, and
    ``islands`` the windows recomputed inside it.  ``use_transition``: whether ``T_C`` is applied (``False``:
    ``S_after = S_before + S_C``); ``fixed_position``: whether a record is bound to its logical position;
    ``reuse``: whether requests use records at all.
    """

    name: str
    head: int = 0
    tail: int = 0
    dummies: int = 0
    anchor: int = 0
    context: str = "none"
    islands: Islands | None = None
    use_transition: bool = True
    fixed_position: bool = False
    reuse: bool = True

    @property
    def reads_text(self) -> bool:
        """Whether planning needs the model's tokenizer."""
        return self.context == "text" or self.islands is not None

    def refused_by(self, traits: ModelTraits) -> str | None:
        """Return the reason why a model of ``traits`` cannot honour this method, or ``None``."""
        if self.fixed_position and traits.has_linear:
            return (
                f"link method {self.name!r} places segments at fixed positions and defines no rule for "
                "recurrent states; this model has linear-attention layers. Use 'hypic' or 'block'"
            )
        if not self.use_transition and not (traits.has_linear and traits.has_transition):
            return (
                f"link method {self.name!r} leaves out the transition of linear-attention layers; this model "
                "has no transitions. Use 'hypic' or 'block'"
            )
        return None


def parse_link(name: str, seam_tokens: int, context: str = "none", islands: str = "none") -> LinkMethod:
    """Resolve a method name, the request's seam width, its context and its islands to a :class:`LinkMethod`.

    ``seam_tokens`` is the window ``w`` of ``hypic`` and ``naive``; the other methods' names carry their own
    windows.  ``context``: one of :data:`CONTEXTS`; ``islands``: one of :data:`ISLANDS`.  Raises
    :class:`LinkError` for an unknown name, a width outside ``0..MAX_SEAM_TOKENS``, and options that exclude
    each other.
    """
    method = _parse_seams(name, seam_tokens)
    if context not in CONTEXTS:
        raise LinkError(f"hypic_context={context!r}: expected one of {', '.join(CONTEXTS)}")
    windows = _parse_islands(islands)
    if not method.reuse:
        return method
    if context != "none" and (method.dummies or method.anchor):
        raise LinkError(
            f"context {context!r}: link method {name!r} puts its own tokens before a segment; expected "
            "'none', or a link method without such tokens, like 'hypic'"
        )
    if method.fixed_position and (context != "none" or windows is not None):
        raise LinkError(f"link method {name!r} takes neither a context nor islands: expected 'none' for both")
    return replace(method, context=context, islands=windows)


def _parse_islands(islands: str) -> Islands | None:
    if islands == "none":
        return None
    found = re.fullmatch(r"query-(\d{1,3})(?:-(\d{1,5}))?", islands) if isinstance(islands, str) else None
    if found is None:
        raise LinkError(f"hypic_islands={islands!r}: expected one of {', '.join(ISLANDS)}")
    percent, tokens = int(found.group(1)), int(found.group(2) or 0)
    if not 1 <= percent <= MAX_ISLAND_PERCENT:
        raise LinkError(f"hypic_islands={islands!r}: expected 1 <= percent <= {MAX_ISLAND_PERCENT}")
    if tokens > MAX_ISLAND_TOKENS:
        raise LinkError(f"hypic_islands={islands!r}: expected tokens <= {MAX_ISLAND_TOKENS}")
    return Islands(percent, tokens)


def _parse_seams(name: str, seam_tokens: int) -> LinkMethod:
    if not isinstance(name, str):
        raise LinkError(f"hypic_link={name!r}: expected one of {', '.join(METHODS)}")
    if isinstance(seam_tokens, bool) or not isinstance(seam_tokens, int):
        raise LinkError(f"hypic_seam_tokens={seam_tokens!r}: expected an integer from 0 to {MAX_SEAM_TOKENS}")
    if not 0 <= seam_tokens <= MAX_SEAM_TOKENS:
        raise LinkError(f"hypic_seam_tokens={seam_tokens}: expected an integer from 0 to {MAX_SEAM_TOKENS}")
    if name == "hypic":
        return LinkMethod(name, head=seam_tokens, tail=seam_tokens)
    if name == "naive":
        return LinkMethod(name, head=seam_tokens, tail=seam_tokens, use_transition=False)
    if name == "block":
        return LinkMethod(name)
    if name == "prompt-cache":
        return LinkMethod(name, fixed_position=True)
    if name == "full":
        return LinkMethod(name, reuse=False)
    if match := re.fullmatch(r"seam-(\d{1,6})-(\d{1,6})(?:\+(\d{1,6}))?", name):
        head, tail, anchor = (int(width or 0) for width in match.groups())
        if max(head, tail, anchor) > MAX_SEAM_TOKENS:
            raise LinkError(f"hypic_link={name!r}: expected h, t and a <= {MAX_SEAM_TOKENS}")
        return LinkMethod(name, head=head, tail=tail, anchor=anchor)
    if match := re.fullmatch(r"epic-(\d{1,6})", name):
        k = int(match.group(1))
        if k == 0:
            return LinkMethod(name, dummies=EPIC0_DUMMY_TOKENS)
        if k > MAX_SEAM_TOKENS:
            raise LinkError(f"hypic_link={name!r}: expected k <= {MAX_SEAM_TOKENS}")
        return LinkMethod(name, head=k)
    raise LinkError(f"hypic_link={name!r}: expected one of {', '.join(METHODS)}")
