"""Orders of the scheduler half to the workers' links, and how they end.

Orders travel in a step's metadata, in the order in which they came up; :class:`SaveRecord` is given by the
worker itself.  One that moves a record ends in one :class:`Outcome`, the others are simply carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..pool.plans import RecordPlace
from ..primitives.keys import SegmentKey

OUTDATED = "the caches were emptied meanwhile: the record may be of outdated weights"
"""Why a record is not delivered."""
NIXL = "nixl"
"""Route of a record that another instance sent over NIXL."""


@dataclass(frozen=True)
class FetchRecord:
    """Read a record from the store's tiers into the pool, where ``place`` is reserved for it.

    Where no tier has it, its outcome says which of the records ``instead`` one has.
    """

    place: RecordPlace
    instead: tuple[SegmentKey, ...] = ()


@dataclass(frozen=True)
class AwaitRecord:
    """Take a record from whichever instance sends it into the pool, where ``place`` is reserved for it."""

    place: RecordPlace


@dataclass(frozen=True)
class PushRecord:
    """Have the complete record in ``place`` at ``destination`` within ``deadline_s``: at another instance
    (``tcp://HOST:PORT``), or in a tier that is shared with it (``tier:IDENTITY``).  ``number`` names the
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
    """Nobody waits for the awaited record numbered ``serial`` any more: it counts as missed.

    ``unless_offered``: only if no instance has it ready to be sent; else nothing happens.
    """

    serial: int
    unless_offered: bool = False


@dataclass(frozen=True)
class DeclineRecord:
    """The record ``key`` was said to come, and is in the pool already or being made there, in ``slot``:
    whoever sends it is told so."""

    key: SegmentKey
    slot: int


class StoreAction(Enum):
    """What the store is to do with a record."""

    DELETE = "delete"
    PIN = "pin"
    UNPIN = "unpin"
    EXPIRE = "expire"


@dataclass(frozen=True)
class StoreOrder:
    """What the store is to do with the record ``key``; ``at``, for EXPIRE, is Unix time, ``None``: never."""

    action: StoreAction
    key: SegmentKey
    at: float | None = None


@dataclass(frozen=True)
class ClearCaches:
    """Forget every record, in all tiers; what is made for requests that run goes there no more, nor to other
    instances.  The weights may have changed: names made from now on are others."""


MovingOrder = FetchRecord | AwaitRecord | PushRecord | SaveRecord
Order = MovingOrder | StopAwaiting | DeclineRecord | StoreOrder | ClearCaches


class Result(Enum):
    """How an order ends that moves a record."""

    DONE = "done"
    FAILED = "failed"
    IN_SHARED_TIER = "in shared tier"
    """The awaited record was left in a tier that is shared with its maker: it is to be fetched from there."""


@dataclass(frozen=True)
class Outcome:
    """The end of an order."""

    order: MovingOrder
    result: Result
    reason: str = ""
    """Why it failed."""
    route: str = ""
    """Name of the tier that had the record, or ``nixl`` or ``tcp`` for one that another instance sent."""
    transition_blocks: int = 0
    """Transition blocks that the record keeps in the pool; of records that arrived."""
    instead: frozenset[SegmentKey] = frozenset()
    """Where the record was not fetched: which of the order's ``instead`` the store has."""


class OrderQueue:
    """Orders that came up since the last step, oldest first.  Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def __len__(self) -> int:
        return len(self._orders)

    def submit(self, order: Order) -> None:
        """The order goes to the workers with the next step."""
        self._orders.append(order)

    def take(self) -> list[Order]:
        """Empty the queue."""
        orders, self._orders = self._orders, []
        return orders
