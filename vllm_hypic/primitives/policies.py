"""Link methods: how a request joins independently cached segments.

A method decides, per interior segment, how many tokens at its head and tail are recomputed with
full context, which tokens are put before it when it is compiled and then dropped, whether the transition
``T_C`` is applied, and whether its position is part of its identity.  The leading segment never
has a seam: it stands at position 0 and has no left neighbour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


class LinkError(ValueError):
    """A link method or seam width that does not exist or that the model cannot honour."""


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model that a link method depends on."""

    has_linear: bool
    """Some layers carry a recurrent state (linear attention, SSM)."""
    has_attention: bool
    """Some layers are softmax attention with a KV cache."""


@dataclass(frozen=True)
class LinkMethod:
    """One resolved link method.

    ``head`` and ``tail`` are the seam window of an interior segment in tokens, ``dummies`` the
    number of tokens put before it at compile time, ``anchor`` that of the leading segment's first tokens
    put there instead, ``use_transition`` whether ``T_C`` is applied
    (``False``: ``S_after = S_before + S_C``), ``fixed_position`` whether a record is bound to its
    logical position, ``reuse`` whether records are used at all.
    """

    name: str
    head: int = 0
    tail: int = 0
    dummies: int = 0
    anchor: int = 0
    use_transition: bool = True
    fixed_position: bool = False
    reuse: bool = True

    def refused_by(self, traits: ModelTraits) -> str | None:
        """Reason why ``traits`` cannot honour this method, or ``None``.  Changes nothing."""
        if self.fixed_position and traits.has_linear:
            return (
                f"link method {self.name!r} places segments at fixed positions and defines no rule for "
                "recurrent states; this model has linear-attention layers. Use 'hypic' or 'block'"
            )
        if not self.use_transition and not traits.has_linear:
            return (
                f"link method {self.name!r} leaves out the transition of linear-attention layers; this model "
                "has none. Use 'hypic' or 'block'"
            )
        return None


def parse_link(name: str, seam_tokens: int) -> LinkMethod:
    """Resolve a method name and the request's seam width to a :class:`LinkMethod`.

    ``seam_tokens`` is the window ``w`` of ``hypic`` and ``naive``; the other methods carry their
    own.  Raises :class:`LinkError` for an unknown name or a width outside ``0..MAX_SEAM_TOKENS``.
    """
    if not isinstance(name, str):
        raise LinkError(f"hypic_link={name!r}: expected one of {', '.join(METHODS)}")
    if isinstance(seam_tokens, bool) or not isinstance(seam_tokens, int):
        raise LinkError(f"hypic_seam_tokens={seam_tokens!r}: expected an integer")
    if not 0 <= seam_tokens <= MAX_SEAM_TOKENS:
        raise LinkError(f"hypic_seam_tokens={seam_tokens}: expected 0 <= w <= {MAX_SEAM_TOKENS}")
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
