"""The router's knowledge of every instance, and the choice of an instance for a request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ...config.router import RouterConfig
from ..description import Description
from ..events import InstanceView

log = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 30.0
FRESH_S = 1.0
"""Seconds that the router's own knowledge of an instance's records outranks the instance's events."""
ASSUMED_S_PER_TOKEN = 0.002
"""Speed assumed before the first timed segment: slow, so that no worker counts as late without reason."""
_SMOOTHING = 0.3


class InstanceState(Enum):
    """States of an instance, which determine the work that it gets."""

    UNKNOWN = "unknown"
    """The router has not reached the instance yet, or has lost it."""
    PLAIN = "plain"
    """The instance answers whole requests, without segment parallelism."""
    DESCRIBED = "described"
    EXCLUDED = "excluded"
    """The instance has another namespace than the pool, or the same receiver as another instance."""


class Exclusion(Enum):
    """Reasons to exclude an instance."""

    NAMESPACE = "namespace"
    RECEIVER = "landing"


@dataclass(frozen=True)
class Roles:
    """Roles of an instance: ``prefill`` computes segments, ``combine`` answers clients."""

    prefill: bool
    combine: bool


class Instance:
    """One instance.  ``watch.py`` writes its description and view; transfers and answers write the rest."""

    def __init__(self, url: str, roles: Roles, settings: RouterConfig) -> None:
        self.url, self.roles = url, roles
        self.state = InstanceState.UNKNOWN
        self.reason = "the router has not reached the instance yet"
        """Why the instance is not usable; empty when described."""
        self.description: Description | None = None
        self.separator_text: str | None = None
        """Text of the separator; ``None``: unknown, so that only tokenising finds separators in a prompt."""
        self.view = InstanceView()
        self.described_boot = ""
        """Boot id of the events at the last description; a different boot id means an unknown process."""
        self._silence_s = settings.silence_s
        self.slots = asyncio.Semaphore(settings.segments_per_worker)
        self.queued_tokens = 0
        """Tokens of the router's segment requests that wait for a slot of this instance."""
        self.sent_tokens = 0
        """Tokens of the router's requests that are open at this instance and not computed yet."""
        self.open_requests = 0
        """Number of clients' requests that are open at this instance."""
        self.last_chosen = 0
        self.s_per_token: float | None = None
        """Smoothed seconds per token; ``None`` before the first timed segment."""
        self._last_done = 0.0
        self._suspect_until = 0.0
        self._back_off_s = 0.0
        self._fresh: OrderedDict[str, float] = OrderedDict()
        self._asked: OrderedDict[str, float] = OrderedDict()

    # -- health ----------------------------------------------------------------------------------

    @property
    def suspect(self) -> bool:
        """Whether a request failed here, and the back-off is not over or events have been silent since."""
        if not self._back_off_s:
            return False
        if time.monotonic() < self._suspect_until:
            return True
        return self.state is InstanceState.DESCRIBED and not self.view.known

    def fail(self, reason: str) -> None:
        """Start a back-off without new requests, after a request failed through the instance's fault.

        Failures during a back-off count as the same failure; later failures double the back-off.
        """
        if time.monotonic() < self._suspect_until:
            return
        self._back_off_s = min(LONGEST_BACK_OFF_S, 2 * self._back_off_s or FIRST_BACK_OFF_S)
        self._suspect_until = time.monotonic() + self._back_off_s
        log.warning("the router avoids %s for %.0f s: %s", self.url, self._back_off_s, reason)

    def trust(self) -> None:
        """End the back-off, because the instance has served a request or is a new process."""
        self._back_off_s = self._suspect_until = 0.0

    @property
    def spreads(self) -> bool:
        """Whether the instance may take part in segment parallelism now."""
        known = self.view.known and self.view.boot == self.described_boot
        return self.state is InstanceState.DESCRIBED and known and not self.suspect

    @property
    def up(self) -> bool:
        """Whether the instance fulfils its role: a described instance spreads, any other answers."""
        return self.spreads if self.state is InstanceState.DESCRIBED else self.answers

    @property
    def answers(self) -> bool:
        """Whether clients' requests may go to the instance now."""
        able = self.state in (InstanceState.DESCRIBED, InstanceState.PLAIN)
        return self.roles.combine and able and not self.suspect and not self.silent

    @property
    def silent(self) -> bool:
        """Whether the instance is described, but no event confirmed its view for ``silence_s`` seconds."""
        return self.state is InstanceState.DESCRIBED and self._silence_s < self.view.age_s

    # -- records ---------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        return key in self.view.resident or self._fresh.get(key, 0.0) > time.monotonic()

    def has_now(self, key: str) -> None:
        """Note that the instance now has a record, which its events may not have reported yet."""
        _note(self._fresh, key)

    def makes(self, key: str) -> bool:
        """Whether the instance computes the record, or was asked for it at most ``FRESH_S`` ago."""
        return key in self.view.pending or self._asked.get(key, 0.0) > time.monotonic()

    def asked_for(self, key: str) -> None:
        """Note that a request for the record was sent, which the events may not have reported yet."""
        _note(self._asked, key)

    # -- load and speed --------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Tokens to prefill here: queued plus the larger of sent and reported tokens, which overlap."""
        return self.queued_tokens + max(self.sent_tokens, self.view.load_tokens)

    def timed(self, tokens: int, sent_at: float) -> None:
        """Update the speed, after the instance has delivered a segment of ``tokens`` sent at ``sent_at``."""
        now = time.monotonic()
        found = (now - max(sent_at, self._last_done)) / max(1, tokens)
        self._last_done = now
        old = self.s_per_token
        self.s_per_token = found if old is None else old + _SMOOTHING * (found - old)


def _note(keys: OrderedDict[str, float], key: str) -> None:
    """Note ``key`` for ``FRESH_S`` seconds, and drop expired keys; the oldest key stands first."""
    now = time.monotonic()
    while keys and next(iter(keys.values())) <= now:
        keys.popitem(last=False)
    keys[key] = now + FRESH_S
    keys.move_to_end(key)


class InstancePool:
    """All instances in the order of ``RouterConfig.urls``: instances that answer clients come first."""

    def __init__(self, settings: RouterConfig) -> None:
        self.instances = [
            Instance(url, Roles(url in settings.prefill, url in settings.combine), settings)
            for url in settings.urls
        ]
        self.namespace: str | None = None
        self.changed = asyncio.Event()
        """Set when records of an instance changed; the waiting task must clear the event."""
        self._turn = itertools.count(1)

    def spreading(self) -> list[Instance]:
        """Return the instances that may take part in segment parallelism now, of any role."""
        return [i for i in self.instances if i.spreads]

    def combiners(self, without: Iterable[Instance] = ()) -> list[Instance]:
        """Return the instances, except ``without``, that may answer clients now; if there are none, return
        instances that failed lately or are silent."""
        left = [i for i in self.instances if i.roles.combine and i not in set(without)]
        # The router cannot check which model a plain instance serves: plain instances are the last resort.
        described = [i for i in left if i.state is InstanceState.DESCRIBED]
        able = described or [i for i in left if i.state is InstanceState.PLAIN]
        return [i for i in able if i.answers] or able

    def cheapest(self, candidates: Sequence[Instance], missing: Sequence[int]) -> Instance:
        """Return the instance with the least prefill: its load plus ``missing`` (tokens, per candidate).

        Ties go to the instance with the fewest clients' requests, then to the least recently chosen instance.
        """
        chosen = min(
            zip(candidates, missing, strict=True),
            key=lambda c: (c[0].load + c[1], c[0].open_requests, c[0].last_chosen),
        )[0]
        chosen.last_chosen = next(self._turn)
        return chosen

    def s_per_token(self, worker: Instance) -> float:
        """Return seconds per token: the worker's own, else the mean of timed instances, else the assumed."""
        if worker.s_per_token is not None:
            return worker.s_per_token
        known = [i.s_per_token for i in self.instances if i.s_per_token is not None]
        return sum(known) / len(known) if known else ASSUMED_S_PER_TOKEN

    def settle(self) -> list[tuple[Instance, Exclusion]]:
        """Exclude described instances with another namespace than the pool's or with another instance's
        receiver; readmit instances that match again.

        The pool's namespace is the namespace of most instances that answer clients.  In a tie the present
        namespace stays, or else the first instance decides.  Returns the instances that this call excluded.
        """
        described = [i for i in self.instances if i.description is not None]
        names = [_namespace(i) for i in described if i.roles.combine] or [_namespace(i) for i in described]
        if not names:
            return []
        counts = Counter(names)
        most = [name for name in counts if counts[name] == max(counts.values())]
        if self.namespace not in most:
            self.namespace = most[0]
        excluded = []
        receivers: dict[str, str] = {}
        for instance in described:
            refusal = self._refusal(instance, receivers)
            if refusal is None:
                instance.state, instance.reason = InstanceState.DESCRIBED, ""
                continue
            kind, reason = refusal
            if instance.state is not InstanceState.EXCLUDED:
                log.error("%s is excluded: %s", instance.url, reason)
                excluded.append((instance, kind))
            instance.state, instance.reason = InstanceState.EXCLUDED, reason
        return excluded

    def _refusal(self, instance: Instance, receivers: dict[str, str]) -> tuple[Exclusion, str] | None:
        """Return why ``instance`` must be excluded, or ``None``.

        ``receivers``: URLs of the instances seen so far, by receiver; this instance is added."""
        assert instance.description is not None and self.namespace is not None
        if _namespace(instance) != self.namespace:
            return Exclusion.NAMESPACE, (
                f"its namespace is {_namespace(instance)[:16]}, other instances have {self.namespace[:16]}: "
                "model, weights, dtypes and the plugin's version must be the same"
            )
        receiver = instance.description.receiver
        if (other := receivers.setdefault(receiver, instance.url)) != instance.url:
            text = f"its receiver {receiver} is the receiver of {other}: give each instance its own `listen`"
            return Exclusion.RECEIVER, text
        return None


def _namespace(instance: Instance) -> str:
    assert instance.description is not None
    return instance.description.namespace
