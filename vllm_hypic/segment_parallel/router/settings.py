"""Options of the router, typed and validated once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...errors import ConfigError
from .ways import Way


@dataclass(frozen=True)
class Settings:
    """What ``vllm-hypic router`` was told.  An instance may be in ``prefill`` and in ``combine``."""

    prefill: tuple[str, ...]
    """Base URLs of instances that compute segments for others."""
    combine: tuple[str, ...]
    """Base URLs of instances that answer clients."""
    api_key: str | None = None
    """For the router's own questions to instances; requests carry their client's."""
    deadline_s: float | None = None
    """Longest that a request waits for segments of others; ``None``: as long as its instance lets it."""
    min_gain: float = 0.1
    """Share of a request's own prefill that its first token must be spared by spreading it; -1: it is spread
    whatever that gains, for measurements."""
    segments_per_worker: int = 2
    """Segment requests open at one worker: one travels while the next is computed."""
    straggler_factor: float = 3.0
    """Multiple of its predicted time after which a segment goes to another worker too."""
    straggler_min_s: float = 3.0
    """No segment counts as late before so many seconds."""
    through: Way = Way.DIRECT
    """Which way records are to take where worker and combine node share a tier; others go directly."""
    silence_s: float = 10.0
    """A combine node whose events are silent for so long is given up, and its requests with it."""

    def __post_init__(self) -> None:
        _urls("--prefill", self.prefill)
        _urls("--combine", self.combine)
        if not self.combine:
            raise ConfigError("no instance answers clients: give --combine URL, or --pool URL")
        if not self.prefill:
            raise ConfigError("no instance computes segments: give --prefill URL, or --pool URL")
        if self.deadline_s is not None:
            _number("--deadline-s", self.deadline_s, above=0)
        if self.min_gain != -1 and not 0 <= self.min_gain <= 1:
            raise ConfigError(f"--min-gain {self.min_gain}: expected a share, 0 to 1, or -1")
        _number("--straggler-factor", self.straggler_factor, at_least=1)
        _number("--straggler-min-s", self.straggler_min_s, above=0)
        _number("--silence-s", self.silence_s, at_least=2)
        if not 1 <= self.segments_per_worker <= 64:
            raise ConfigError(f"--segments-per-worker {self.segments_per_worker}: expected 1 to 64")

    def enough(self, gain: float) -> bool:
        """Whether a request is spread that gains so much by it."""
        return self.min_gain < 0 or (gain > 0 and gain >= self.min_gain)

    @property
    def urls(self) -> tuple[str, ...]:
        """Every instance once, those that answer clients first."""
        return tuple(dict.fromkeys((*self.combine, *self.prefill)))


def base_url(option: str, url: str) -> str:
    """``url`` without a slash at its end; :class:`ConfigError` unless it is http(s)://HOST[:PORT][/PATH]."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or parts.query or parts.fragment or parts.username is not None or url != url.strip():
        raise ConfigError(f"{option} {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def _urls(option: str, urls: Sequence[str]) -> None:
    for i, url in enumerate(urls):
        if base_url(option, url) != url:
            raise ConfigError(f"{option} {url!r}: expected no slash at its end")
        if url in urls[:i]:
            raise ConfigError(f"{option} {url!r}: is given twice")


def _number(option: str, value: float, *, above: float | None = None, at_least: float | None = None) -> None:
    if above is not None and not above < value < math.inf:
        raise ConfigError(f"{option} {value}: expected a finite number > {above:g}")
    if at_least is not None and not at_least <= value < math.inf:
        raise ConfigError(f"{option} {value}: expected a finite number >= {at_least:g}")
