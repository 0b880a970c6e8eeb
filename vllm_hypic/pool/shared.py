"""Values that several layers share: made by the first that asks, typed by who makes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared:
    """One object of each class that layers ask for, as long as a pass or a worker lives."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def of(self, kind: type[T]) -> T:
        """The one object of this class, made without arguments when it is first asked for."""
        if kind not in self._made:
            self._made[kind] = kind()
        found: T = self._made[kind]
        return found


class Once(Generic[T]):
    """A value that the first caller makes and all get."""

    def __init__(self) -> None:
        self._made: list[T] = []

    def __call__(self, make: Callable[[], T]) -> T:
        if not self._made:
            self._made.append(make())
        return self._made[0]


class OncePer:
    """Values that the first caller makes of an object and all get: one for each object and kind."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], tuple[object, Any]] = {}

    def __call__(self, of: object, kind: Hashable, make: Callable[[], T]) -> T:
        key = id(of), kind
        if key not in self._made:
            # The object itself is kept beside, so that no other can have its address.
            self._made[key] = of, make()
        found: T = self._made[key][1]
        return found
