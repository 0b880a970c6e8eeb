"""A receiver's memory of names and offers, bounded in number and in time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


class Recent:
    """Remember names for ``age_s`` seconds, at most ``most`` of them: the oldest name is dropped first."""

    def __init__(self, most: int, age_s: float) -> None:
        self._most, self._age_s = most, age_s
        self._since: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, name: str, now: float) -> None:
        self._since[name] = now
        self._since.move_to_end(name)
        if len(self._since) > self._most:
            self._since.popitem(last=False)

    def has(self, name: str, now: float) -> bool:
        return now < self._since.get(name, -float("inf")) + self._age_s

    def discard(self, name: str) -> None:
        self._since.pop(name, None)

    def pop(self, name: str, now: float) -> bool:
        """Forget ``name``, and return whether it was remembered."""
        found = self.has(name, now)
        self.discard(name)
        return found

    def expire(self, now: float) -> None:
        while self._since and next(iter(self._since.values())) + self._age_s <= now:
            self._since.popitem(last=False)


@dataclass(frozen=True)
class Offered:
    name: str
    peer: bytes
    nbytes: int
    since: float


class Offers:
    """Keep unanswered offers, oldest first: one per name and peer, at most ``most`` in all, for ``age_s``."""

    def __init__(self, most: int, age_s: float) -> None:
        self._most, self._age_s = most, age_s
        self._all: OrderedDict[tuple[str, bytes], Offered] = OrderedDict()
        self._of_name: dict[str, OrderedDict[bytes, Offered]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, name: str, peer: bytes, nbytes: int, now: float) -> None:
        """Keep an offer.  A repeated offer keeps its place among the offers of its name; its age restarts."""
        offered = Offered(name, peer, nbytes, now)
        self._all[name, peer] = offered
        self._all.move_to_end((name, peer))
        self._of_name.setdefault(name, OrderedDict())[peer] = offered
        if len(self._all) > self._most:
            self._drop(next(iter(self._all.values())))

    def of(self, name: str) -> list[Offered]:
        return list(self._of_name.get(name, {}).values())

    def pop(self, name: str, peer: bytes) -> Offered | None:
        if offered := self._all.get((name, peer)):
            self._drop(offered)
        return offered

    def pop_name(self, name: str) -> list[Offered]:
        found = self.of(name)
        for offered in found:
            self._drop(offered)
        return found

    def drop_peer(self, peer: bytes) -> None:
        for offered in [o for o in self._all.values() if o.peer == peer]:
            self._drop(offered)

    def expire(self, now: float) -> None:
        while self._all and (oldest := next(iter(self._all.values()))).since + self._age_s <= now:
            self._drop(oldest)

    def _drop(self, offered: Offered) -> None:
        del self._all[offered.name, offered.peer]
        peers = self._of_name[offered.name]
        del peers[offered.peer]
        if not peers:
            del self._of_name[offered.name]
