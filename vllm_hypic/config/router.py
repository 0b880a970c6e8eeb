"""RouterConfig: the options of ``vllm-hypic router``."""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PlainValidator, StrictInt

from .schema import Allowed, ConfigSection, Loc, Number, expected, options, refuse


class RecordRoute(Enum):
    """How a record gets from a worker to the combine node; ``--through`` names the route to try first."""

    DIRECT = "direct"
    """The worker sends it to the combine node."""
    TIERS = "tiers"
    """The worker leaves it in a tier that both share, and the combine node reads it there."""


def _base_url(url: Any) -> str:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or parts.query or parts.fragment or parts.username is not None or url != url.strip():
        raise expected("http://HOST:PORT or https://HOST:PORT")
    if url.endswith("/"):
        raise expected("a URL without a slash at its end")
    return str(url)


def _different(urls: tuple[str, ...]) -> tuple[str, ...]:
    for i, url in enumerate(urls):
        if url in urls[:i]:
            refuse((i,), url, "is given twice", "twice")
    return urls


def _gain(share: float) -> float:
    if share != -1 and not 0 <= share <= 1:
        raise expected("")
    return share


Urls = Annotated[tuple[Annotated[str, PlainValidator(_base_url)], ...], AfterValidator(_different)]
Above0 = Annotated[Number, Field(gt=0, lt=math.inf), Allowed("a finite number > 0")]


@options
class RouterConfig(ConfigSection):
    """What ``vllm-hypic router`` was told.  An instance may be in ``prefill`` and in ``combine``."""

    prefill: Urls
    """Base URLs of instances that compute segments for others."""
    combine: Urls
    """Base URLs of instances that answer clients."""
    api_key: str | None = None
    """The key of the router's own questions to instances; requests carry their client's."""
    deadline_s: Above0 | None = None
    """Longest that a request waits for segments of others; ``None``: as long as its instance lets it."""
    min_gain: Annotated[Number, AfterValidator(_gain), Allowed("a number from 0 to 1, or -1")] = 0.1
    """Share of a request's own prefill that its first token must be spared by spreading it; -1: it is spread
    whatever that gains, for measurements."""
    segments_per_worker: Annotated[StrictInt, Field(ge=1, le=64), Allowed("1 to 64")] = 2
    """Segment requests open at one worker: one travels while the next is computed."""
    straggler_factor: Annotated[Number, Field(ge=1, lt=math.inf), Allowed("a finite number >= 1")] = 3.0
    """Multiple of its predicted time after which a segment goes to another worker too."""
    straggler_min_s: Above0 = 3.0
    """No segment counts as late before so many seconds."""
    through: RecordRoute = RecordRoute.DIRECT
    """The route of records where worker and combine node share a tier; others go directly."""
    silence_s: Annotated[Number, Field(ge=2, lt=math.inf), Allowed("a finite number >= 2")] = 10.0
    """A combine node whose events are silent for so long is given up, and its requests with it."""

    def __post_init__(self) -> None:
        if not self.combine:
            raise ValueError("no instance answers clients: give --combine URL, or --pool URL")
        if not self.prefill:
            raise ValueError("no instance computes segments: give --prefill URL, or --pool URL")

    def enough(self, gain: float) -> bool:
        """Whether a request that gains so much by it is spread."""
        return self.min_gain < 0 or (gain > 0 and gain >= self.min_gain)

    @property
    def urls(self) -> tuple[str, ...]:
        """Every instance once, those that answer clients first."""
        return tuple(dict.fromkeys((*self.combine, *self.prefill)))

    @classmethod
    def refusal(cls, loc: Loc, value: object, text: str, kind: str) -> str:
        """The message in the words of the command line."""
        says = f"expected {text}" if kind == "expected" else text
        return f"--{str(loc[0]).replace('_', '-')} {value!r}: {says}" if loc else text
