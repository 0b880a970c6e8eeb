"""Values that several layers share: the first caller makes a value and decides its type."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared:
    """Keeps one object of each class that layers ask for, for the life of a pass or a worker."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def of(self, kind: type[T]) -> T:
        """Return the only object of class ``kind``; the first call makes it without arguments."""
        if kind not in self._made:
            self._made[kind] = kind()
        found: T = self._made[kind]
        return found


class Once(Generic[T]):
    """A value that the first caller makes and all callers get."""

    def __init__(self) -> None:
        self._made: list[T] = []

    def __call__(self, make: Callable[[], T]) -> T:
        if not self._made:
            self._made.append(make())
        return self._made[0]


class OncePer:
    """Values by object and kind, each of which the first caller makes and all callers get."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], tuple[object, Any]] = {}

    def __call__(self, of: object, kind: Hashable, make: Callable[[], T]) -> T:
        key = id(of), kind
        if key not in self._made:
            # The entry keeps the object alive, so that no other object can have its address.
            self._made[key] = of, make()
        found: T = self._made[key][1]
        return found
