"""Options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from vllm_hypic.harness.settings import with_options

from .lib.settings import SHORTEST


class Shapes(click.ParamType):
    """Numbers and lengths of segments: ``4x2048,16x128``."""

    name = "shapes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        if isinstance(value, tuple):
            return value
        try:
            shapes = tuple(_shape(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: expected segments x tokens, like 4x2048,16x128", param, ctx)
        for segments, tokens in shapes:
            if not (1 <= segments <= 256 and SHORTEST <= tokens <= 65536):
                self.fail(
                    f"{segments}x{tokens}: expected 1 to 256 segments of {SHORTEST} to 65536", param, ctx
                )
        return shapes


def _shape(text: str) -> tuple[int, int]:
    segments, tokens = text.split("x")
    return int(segments), int(tokens)


def repeat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--repeats`` and ``--seed``."""
    return with_options(
        command,
        click.option(
            "--repeats",
            type=click.IntRange(1, 1000),
            default=5,
            show_default=True,
            help="Measurements of each point, after a warm-up that is not counted.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the documents."),
    )


def needed_context(shapes: Sequence[tuple[int, int]], beside: int) -> int:
    """Context of the longest prompt: ``shapes`` are (segments, tokens each), ``beside`` everything else."""
    return max(segments * tokens for segments, tokens in shapes) + beside
