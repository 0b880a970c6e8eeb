"""Per-request options, carried by vLLM's own extra-argument fields.

``vllm_xargs`` of the OpenAI endpoints and ``SamplingParams(extra_args=...)`` of Python both arrive
as one flat mapping; ours are the keys with the prefix ``hypic_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .policies import LinkError, LinkMethod, parse_link

LINK = "hypic_link"
SEAM = "hypic_seam_tokens"
PREFIX = "hypic_"
KNOWN = (LINK, SEAM)


def link_of_request(
    extra_args: Mapping[str, Any] | None, *, default_link: str, default_seam: int
) -> LinkMethod:
    """The link method a request asks for.  Raises :class:`LinkError` naming a bad key or value."""
    extra = extra_args or {}
    unknown = sorted(k for k in extra if isinstance(k, str) and k.startswith(PREFIX) and k not in KNOWN)
    if unknown:
        raise LinkError(f"unknown request option {unknown[0]!r}: expected one of {', '.join(KNOWN)}")
    seam = extra.get(SEAM, default_seam)
    if isinstance(seam, float) and seam.is_integer():
        seam = int(seam)  # JSON clients send 8.0
    return parse_link(extra.get(LINK, default_link), seam)
