"""The index of a tier with a byte budget: held, pinned, expiring and unfinished objects.

The index sees no bytes and no clock, and is not thread-safe: its owner locks.  Only ``in`` and ``is_expired``
are safe without the lock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from ..eviction.policy import EvictionPolicy
from ..protocol import CacheValue, ObjectName
from .base import Held


class Refusal(Enum):
    """Reasons why an object gets no room."""

    TOO_LARGE = "the object is larger than the tier's budget"
    PINNED = "pinned records and records being written leave too little room"
    NOT_ADMITTED = "the object is worth less than the records in its place"


@dataclass(frozen=True)
class Plan:
    """Room for one object after ``victims`` are gone."""

    name: ObjectName
    value: CacheValue
    victims: tuple[ObjectName, ...]


@dataclass
class Counts:
    """Counts of objects that left since the tier was made.  The index writes all but ``damaged``."""

    evicted: int = 0
    expired: int = 0
    damaged: int = 0
    """Objects that are longer than their reader can take, or that differ from the written bytes."""


class CapacityIndex:
    """The objects of one tier.  The ``value.nbytes`` of an object counts against ``budget`` bytes.

    A put goes through ``plan_put -> reserve -> commit | abort``; the victims of a plan leave with
    ``reserve``.  A pin belongs to a name, held or not.  Pins are not counted: one unpin ends several pins.
    An expiry belongs to an object and ends when the object leaves, but may be set before the put.
    """

    def __init__(self, budget: int, policy: EvictionPolicy) -> None:
        if budget < 0:
            raise ValueError(f"budget of {budget} bytes: expected an integer >= 0")
        self.budget = budget
        self.counts = Counts()
        self._policy = policy
        self._held: dict[ObjectName, CacheValue] = {}
        self._reserved: dict[ObjectName, Plan] = {}
        self._pins: set[ObjectName] = set()
        self._expiries: dict[ObjectName, float] = {}
        self._soonest = float("inf")  # no expiry of an unpinned name is earlier
        self._used = 0
        self._reserved_bytes = 0

    def __contains__(self, name: ObjectName) -> bool:
        return name in self._held

    @property
    def used(self) -> int:
        """Bytes of the held objects, without reserved bytes."""
        return self._used

    def value(self, name: ObjectName) -> CacheValue | None:
        """Return the object's cache value, or ``None`` if the object is not held."""
        return self._held.get(name)

    def entry(self, name: ObjectName) -> Held | None:
        """Return the object's entry, or ``None`` if the object is not held."""
        value = self._held.get(name)
        return None if value is None else Held(name, value, self._expiries.get(name))

    def held(self) -> list[Held]:
        """Return all held objects.  Changes nothing."""
        return [Held(name, value, self._expiries.get(name)) for name, value in self._held.items()]

    # -- coming

    def plan_put(
        self, name: ObjectName, value: CacheValue, keep: Collection[ObjectName] = ()
    ) -> Plan | Refusal:
        """Plan room for an object that is neither held nor reserved, or return the refusal.  Changes nothing.

        ``keep``: objects that cannot leave just now, like pinned objects.
        """
        if value.nbytes > self.budget:
            return Refusal.TOO_LARGE
        victims = self.victims(value.nbytes - (self.budget - self._used - self._reserved_bytes), keep)
        if victims is None:
            return Refusal.PINNED
        if not self._policy.admits(name, value, list[str](victims)):
            return Refusal.NOT_ADMITTED
        return Plan(name, value, tuple(victims))

    def victims(self, nbytes: int, keep: Collection[ObjectName] = ()) -> list[ObjectName] | None:
        """Return the worst objects, of at least ``nbytes`` together; ``None``: that many bytes may not leave.

        Changes nothing.
        """
        victims: list[ObjectName] = []
        if nbytes <= 0:
            return victims
        for key in self._policy.worst_first():
            victim = ObjectName(key)
            if victim not in self._pins and victim not in keep:
                victims.append(victim)
                nbytes -= self._held[victim].nbytes
                if nbytes <= 0:
                    return victims
        return None

    def reserve(self, plan: Plan) -> None:
        """Evict the plan's victims and keep the room.  No other change may lie between plan and reserve."""
        for victim in plan.victims:
            self.remove(victim, evicted=True)
        self._reserved[plan.name] = plan
        self._reserved_bytes += plan.value.nbytes

    def commit(self, plan: Plan) -> None:
        """Turn the reservation into a held object: the object is complete."""
        self.abort(plan)
        self.adopt(plan.name, plan.value)

    def abort(self, plan: Plan) -> None:
        """Give the room back.  The plan's victims do not return."""
        del self._reserved[plan.name]
        self._reserved_bytes -= plan.value.nbytes

    def adopt(self, name: ObjectName, value: CacheValue) -> None:
        """Add an object that exists already, whatever the budget.  The name is neither held nor reserved."""
        self._held[name] = value
        self._used += value.nbytes
        self._policy.added(name, value)

    # -- staying

    def hit(self, name: ObjectName) -> None:
        """Note a use of the object.  Names that are not held are ignored."""
        self._policy.hit(name)

    def missed(self, name: ObjectName, value: CacheValue) -> None:
        """Note a miss: an absent object was requested.  The owner calls this before every put of a new
        object."""
        self._policy.missed(name, value)

    def pin(self, name: ObjectName) -> None:
        """Exempt the object, or a later object of this name, from eviction and expiry."""
        self._pins.add(name)

    def unpin(self, name: ObjectName) -> None:
        self._pins.discard(name)
        self._soonest = min(self._soonest, self._expiries.get(name, self._soonest))

    def expire(self, name: ObjectName, at: float | None) -> None:
        """Set the Unix time from which the object, or a later object of this name, counts as ``expired``."""
        if at is None:
            self._expiries.pop(name, None)
        else:
            self._expiries[name] = at
            self._soonest = min(self._soonest, at)

    def is_expired(self, name: ObjectName, now: float) -> bool:
        """Return whether the object has expired at ``now``.  Safe without the lock."""
        at = self._expiries.get(name)
        return at is not None and at <= now and name not in self._pins

    # -- leaving

    def expired(self, now: float, keep: Collection[ObjectName] = ()) -> list[ObjectName]:
        """Return the objects that the owner must remove at ``now``, except for objects in ``keep``.

        Forgets passed expiries of absent names.
        """
        if now < self._soonest:
            return []
        due = [n for n, at in self._expiries.items() if at <= now and n not in self._pins]
        for name in due:
            if name not in self._held and name not in self._reserved:
                del self._expiries[name]
        heeded = (at for name, at in self._expiries.items() if name not in self._pins)
        self._soonest = min(heeded, default=float("inf"))
        return [name for name in due if name in self._held and name not in keep]

    def remove(self, name: ObjectName, *, evicted: bool = False, expired: bool = False) -> bool:
        """Remove the object, pinned or not, and its expiry; return whether the object was held."""
        self._expiries.pop(name, None)
        value = self._held.pop(name, None)
        if value is None:
            return False
        self._used -= value.nbytes
        self.counts.evicted += evicted
        self.counts.expired += expired
        self._policy.removed(name, evicted=evicted)
        return True

    def clear(self) -> None:
        """Remove all objects and expiries; pins and reservations stay."""
        for name in list(self._held):
            self.remove(name)
        self._expiries.clear()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` that names a contradiction in the books, if there is one."""
        used = sum(value.nbytes for value in self._held.values())
        reserved = sum(plan.value.nbytes for plan in self._reserved.values())
        if (used, reserved) != (self._used, self._reserved_bytes):
            raise AssertionError(
                f"{used} bytes held, {reserved} reserved: counted {self._used} and {self._reserved_bytes}"
            )
        if used + reserved > self.budget:
            raise AssertionError(f"{used} bytes held, {reserved} reserved: the budget is {self.budget}")
        known = sorted(self._policy.worst_first())
        if known != sorted(self._held):
            raise AssertionError(f"the policy has {known}, the index {sorted(self._held)}")
        both = self._held.keys() & self._reserved.keys()
        if both:
            raise AssertionError(f"objects both held and reserved: {sorted(both)}")
        late = [
            n
            for n, at in self._expiries.items()
            if n in self._held and n not in self._pins and at < self._soonest
        ]
        if late:
            raise AssertionError(f"objects that expire before the index's {self._soonest}: {late}")
