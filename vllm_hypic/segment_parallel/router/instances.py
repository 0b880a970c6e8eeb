"""What the router knows of every instance, and which one a request should go to."""

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
"""How long we know better than an instance's events what it has and makes."""
ASSUMED_S_PER_TOKEN = 0.002
"""Assumed until a segment was timed: slow, so that nobody is called late without reason."""
_SMOOTHING = 0.3


class InstanceState(Enum):
    """Whether an instance may be given work."""

    UNKNOWN = "unknown"
    """Not reached yet, or no longer."""
    PLAIN = "plain"
    """Answers requests whole; it takes no part in segment parallelism."""
    DESCRIBED = "described"
    EXCLUDED = "excluded"
    """It has another namespace than the pool, or is described as another one is."""


class Exclusion(Enum):
    """Why an instance is excluded."""

    NAMESPACE = "namespace"
    RECEIVER = "landing"


@dataclass(frozen=True)
class Roles:
    """What an instance is used for."""

    prefill: bool
    combine: bool


class Instance:
    """One instance.  ``watch.py`` writes what it says of itself, transfers and answers what they find out."""

    def __init__(self, url: str, roles: Roles, settings: RouterConfig) -> None:
        self.url, self.roles = url, roles
        self.state = InstanceState.UNKNOWN
        self.reason = "the router has not reached it yet"
        """Why it is not usable."""
        self.description: Description | None = None
        self.separator_text: str | None = None
        """The separator in prompts; ``None``: not known, so every text must be tokenised to find it."""
        self.view = InstanceView()
        self.described_boot = ""
        """Boot id of the events when it was last described: another one is a process we know nothing of."""
        self._silence_s = settings.silence_s
        self.slots = asyncio.Semaphore(settings.segments_per_worker)
        self.queued_tokens = 0
        """Tokens of our segment requests that wait for a slot here."""
        self.sent_tokens = 0
        """Tokens of our requests that are open here and not computed yet."""
        self.open_requests = 0
        """Clients' requests that are open here."""
        self.last_chosen = 0
        self._s_per_token: float | None = None
        self._last_done = 0.0
        self._suspect_until = 0.0
        self._back_off_s = 0.0
        self._fresh: OrderedDict[str, float] = OrderedDict()
        self._asked: OrderedDict[str, float] = OrderedDict()

    # -- health ----------------------------------------------------------------------------------

    @property
    def suspect(self) -> bool:
        """A request to it failed, and its back-off is not over, or its events are silent since."""
        if not self._back_off_s:
            return False
        if time.monotonic() < self._suspect_until:
            return True
        return self.state is InstanceState.DESCRIBED and not self.view.known

    def fail(self, reason: str) -> None:
        """A request to it failed for reasons that are its own: nothing new is sent there for a while.

        Requests that fail together count as one failure.
        """
        if time.monotonic() < self._suspect_until:
            return
        self._back_off_s = min(LONGEST_BACK_OFF_S, 2 * self._back_off_s or FIRST_BACK_OFF_S)
        self._suspect_until = time.monotonic() + self._back_off_s
        log.warning("the router avoids %s for %.0f s: %s", self.url, self._back_off_s, reason)

    def trust(self) -> None:
        """End its back-off: it did what it was asked, or is a new process."""
        self._back_off_s = self._suspect_until = 0.0

    @property
    def spreads(self) -> bool:
        """Whether it may take part in segment parallelism now."""
        known = self.view.known and self.view.boot == self.described_boot
        return self.state is InstanceState.DESCRIBED and known and not self.suspect

    @property
    def up(self) -> bool:
        """Whether it does all that it is there for."""
        return self.spreads if self.state is InstanceState.DESCRIBED else self.answers

    @property
    def answers(self) -> bool:
        """Whether clients' requests may go to it now."""
        able = self.state in (InstanceState.DESCRIBED, InstanceState.PLAIN)
        return self.roles.combine and able and not self.suspect and not self.silent

    @property
    def silent(self) -> bool:
        """Whether its engine should have been heard of for long."""
        return self.state is InstanceState.DESCRIBED and self._silence_s < self.view.age_s

    # -- records ---------------------------------------------------------------------------------

    def holds(self, key: str) -> bool:
        return key in self.view.resident or self._fresh.get(key, 0.0) > time.monotonic()

    def has_now(self, key: str) -> None:
        """A record was made there or sent to it; its events have perhaps not said so yet."""
        _note(self._fresh, key)

    def makes(self, key: str) -> bool:
        """Whether it computes the record, or has been asked to just now."""
        return key in self.view.pending or self._asked.get(key, 0.0) > time.monotonic()

    def asked_for(self, key: str) -> None:
        """A request for the record was sent; its events have perhaps not said so yet."""
        _note(self._asked, key)

    # -- load and speed --------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Tokens to prefill there: what it reports (ours among them), and what we have not sent yet."""
        return self.queued_tokens + max(self.sent_tokens, self.view.load_tokens)

    def timed(self, tokens: int, sent_at: float) -> None:
        """Learn its speed: it computed and delivered a segment that was sent at ``sent_at``."""
        now = time.monotonic()
        found = (now - max(sent_at, self._last_done)) / max(1, tokens)
        self._last_done = now
        old = self._s_per_token
        self._s_per_token = found if old is None else old + _SMOOTHING * (found - old)

    @property
    def s_per_token(self) -> float | None:
        """Seconds a token, smoothed; ``None``: nothing was timed yet."""
        return self._s_per_token


def _note(keys: OrderedDict[str, float], key: str) -> None:
    """Note the key for a while; those that have been there longest stand first."""
    now = time.monotonic()
    while keys and next(iter(keys.values())) <= now:
        keys.popitem(last=False)
    keys[key] = now + FRESH_S
    keys.move_to_end(key)


class InstancePool:
    """All instances, those that answer clients first, in the order of the command line."""

    def __init__(self, settings: RouterConfig) -> None:
        self.instances = [
            Instance(url, Roles(url in settings.prefill, url in settings.combine), settings)
            for url in settings.urls
        ]
        self.namespace: str | None = None
        self.changed = asyncio.Event()
        """Some instance has or makes other records than before; whoever waits for it clears it."""
        self._turn = itertools.count(1)

    def spreading(self) -> list[Instance]:
        """Instances whose records are known now, whatever their role."""
        return [i for i in self.instances if i.spreads]

    def combiners(self, without: Iterable[Instance] = ()) -> list[Instance]:
        """Instances that may answer clients now; all that failed lately where no other is left."""
        left = [i for i in self.instances if i.roles.combine and i not in set(without)]
        # What a plain one serves cannot be checked: it is better than nothing only.
        described = [i for i in left if i.state is InstanceState.DESCRIBED]
        able = described or [i for i in left if i.state is InstanceState.PLAIN]
        return [i for i in able if i.answers] or able

    def cheapest(self, candidates: Sequence[Instance], missing: Sequence[int]) -> Instance:
        """The instance that would answer first: ``missing`` tokens would have to be prefilled at each.

        Among equals the one with the fewest clients' requests, then the one not chosen for the longest time.
        """
        chosen = min(
            zip(candidates, missing, strict=True),
            key=lambda c: (c[0].load + c[1], c[0].open_requests, c[0].last_chosen),
        )[0]
        chosen.last_chosen = next(self._turn)
        return chosen

    def s_per_token(self, worker: Instance) -> float:
        """The instance's own speed, or that of the others, or the assumed one."""
        if worker.s_per_token is not None:
            return worker.s_per_token
        known = [i.s_per_token for i in self.instances if i.s_per_token is not None]
        return sum(known) / len(known) if known else ASSUMED_S_PER_TOKEN

    def settle(self) -> list[tuple[Instance, Exclusion]]:
        """Exclude described instances of another namespace than the pool's, or with another one's receiver;
        take back those that match.

        The pool's is that of most instances that answer clients; among equals it stays what it was, then that
        of the first one counts.  Returns those that this call excluded.
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
        """Why it takes no part, if so; ``receivers``: those of the others so far, with their URLs."""
        assert instance.description is not None and self.namespace is not None
        if _namespace(instance) != self.namespace:
            return Exclusion.NAMESPACE, (
                f"its namespace is {_namespace(instance)[:16]}, the pool's {self.namespace[:16]}: model, "
                "weights, dtypes and the plugin's version must be the same"
            )
        receiver = instance.description.receiver
        if (other := receivers.setdefault(receiver, instance.url)) != instance.url:
            text = f"it receives records at {receiver}, as {other} does: give each its own `listen`"
            return Exclusion.RECEIVER, text
        return None


def _namespace(instance: Instance) -> str:
    assert instance.description is not None
    return instance.description.namespace
