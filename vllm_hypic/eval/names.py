"""Types of the command's options."""

from __future__ import annotations

import json
from collections.abc import Callable
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
            self.fail(f"{value!r}: a name stands there twice", param, ctx)
        return names


class Options(click.ParamType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = value if isinstance(value, dict) else json.loads(value)
        except ValueError as e:
            self.fail(f"{value!r} is no JSON: {e}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r}: expected an object", param, ctx)
        return found
