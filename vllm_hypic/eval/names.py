"""Types of the command's options."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click


class Names(click.ParamType):
    """Different names with commas between, each of which ``read`` takes; it raises ``ValueError``."""

    name = "names"

    def __init__(self, read: Callable[[str], object]) -> None:
        self.read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        for name in names:
            try:
                self.read(name)
            except ValueError as e:
                self.fail(str(e), param, ctx)
        if len(set(names)) < len(names):
            self.fail(f"{value!r}: expected different names", param, ctx)
        return names


class JsonObject(click.ParamType):
    """A JSON object without the names ``ours``."""

    name = "json"

    def __init__(self, ours: Sequence[str] = ()) -> None:
        self.ours = ours

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(value)
        except ValueError as e:
            self.fail(f"{value!r} is not JSON: {e}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r}: expected a JSON object", param, ctx)
        if ours := [name for name in found if name in self.ours]:
            self.fail(f"the command sets {ours[0]!r} itself: leave it out", param, ctx)
        return found
