"""Types of options of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click


class Names(click.ParamType):
    """Distinct names, separated by commas; ``read`` raises ``ValueError`` for a name that is not allowed."""

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
    """A JSON object; names in ``ours`` are refused, because the command sets these names itself."""

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
