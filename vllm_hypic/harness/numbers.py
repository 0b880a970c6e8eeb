"""Type of an option that is a list of numbers."""

from __future__ import annotations

import math
from typing import Any

import click


class Numbers(click.ParamType):
    """Distinct finite numbers separated by commas, such as ``4,8,12,16``; ``each`` converts a number."""

    name = "numbers"

    def __init__(self, each: click.IntRange | click.FloatRange) -> None:
        self.each = each

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self.each.convert(part, param, ctx) for part in value.split(","))
        except click.BadParameter as e:
            self.fail(f"{e.message.rstrip('.')}; expected numbers separated by commas", param, ctx)
        if not all(map(math.isfinite, numbers)):
            self.fail(f"{value!r}: expected finite numbers", param, ctx)
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r}: expected different numbers", param, ctx)
        return numbers
