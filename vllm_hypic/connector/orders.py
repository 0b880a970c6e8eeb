"""Orders of the scheduler half to the workers' links, and their outcomes.

Orders travel in a step's metadata, in the sequence in which they came up; the worker, too, may give a
:class:`SaveRecord`.  An order that moves a record ends in one :class:`Outcome`; other orders have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..pool.plans import RecordPlace
from ..primitives.keys import SegmentKey

OUTDATED = "the engine reset its caches: the record may come from outdated weights"
"""A reason for a failed delivery."""
NIXL = "nixl"
"""Route of a record that another instance sent over NIXL."""


@dataclass(frozen=True)
class FetchRecord:
    """Read a record from the store's tiers into its reserved ``place`` in the pool.

    If no tier has the record, the outcome names the records of ``fallback_keys`` that a tier has.
    """

    place: RecordPlace
    fallback_keys: tuple[SegmentKey, ...] = ()


@dataclass(frozen=True)
class AwaitRecord:
    """Take a record from any instance that sends it into its reserved ``place`` in the pool."""

    place: RecordPlace


@dataclass(frozen=True)
class PushRecord:
    """Bring the complete record in ``place`` to ``destination`` within ``deadline_s`` seconds: to another
    instance (``tcp://HOST:PORT``), or into a tier shared with it (``tier:IDENTITY``).  ``number`` names the
    order in reports."""

    number: int
    place: RecordPlace
    destination: str
    deadline_s: float


@dataclass(frozen=True)
class SaveRecord:
    """Hand the complete record in ``place`` to the store."""

    place: RecordPlace


@dataclass(frozen=True)
class StopAwaiting:
    """Stop awaiting the record numbered ``serial``, for which no request waits any more: it counts as missed.

    ``unless_offered``: only if no instance has the record ready to send; otherwise nothing happens.
    """

    serial: int
    unless_offered: bool = False


@dataclass(frozen=True)
class DeclineRecord:
    """Tell the sender of record ``key`` not to send it, as the pool has or makes it in ``slot``."""

    key: SegmentKey
    slot: int


class StoreAction(Enum):
    """An action of the store on a record."""

    DELETE = "delete"
    PIN = "pin"
    UNPIN = "unpin"
    EXPIRE = "expire"


@dataclass(frozen=True)
class StoreOrder:
    """Carry out an action on the stored record ``key``; ``at``, for EXPIRE, is Unix time, ``None``: never."""

    action: StoreAction
    key: SegmentKey
    at: float | None = None


@dataclass(frozen=True)
class ClearCaches:
    """Forget every record in all tiers, as the weights may have changed.  Records made for running requests
    no longer go to tiers or other instances.  Records made later have other names."""


MovingOrder = FetchRecord | AwaitRecord | PushRecord | SaveRecord
Order = MovingOrder | StopAwaiting | DeclineRecord | StoreOrder | ClearCaches


class Result(Enum):
    """The result of an order that moves a record."""

    DONE = "done"
    FAILED = "failed"
    IN_SHARED_TIER = "in shared tier"
    """The maker left the awaited record in a shared tier, from which it must be fetched."""


@dataclass(frozen=True)
class Outcome:
    """The end of an order."""

    order: MovingOrder
    result: Result
    reason: str = ""
    """The reason for a failure."""
    route: str = ""
    """Name of the record's tier, or ``nixl`` or ``tcp`` for a record that another instance sent."""
    transition_blocks: int = 0
    """Number of transition blocks that an arrived record keeps in the pool; 0 for other results."""
    fallback_keys: frozenset[SegmentKey] = frozenset()
    """Keys of the order's ``fallback_keys`` that the store has, if the fetch failed; empty otherwise."""


class OrderQueue:
    """Orders that came up since the last step, oldest first.  For the scheduler's thread only."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def __len__(self) -> int:
        return len(self._orders)

    def submit(self, order: Order) -> None:
        """Send the order to the workers with the next step."""
        self._orders.append(order)

    def take(self) -> list[Order]:
        """Empty the queue and return its orders."""
        orders, self._orders = self._orders, []
        return orders
