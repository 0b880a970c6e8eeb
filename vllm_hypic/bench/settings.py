"""Options that every benchmark with engines shares."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ..config import ConfigError, HypicConfig
from .sizes import SIZES, random_model

CONTEXT = 32768
"""Engines are given this context, or more where a benchmark needs more: the same for most benchmarks, so
that vLLM's cache of compiled models serves them all."""


@dataclass(frozen=True)
class EngineSettings:
    """How engines are started; everything that is not named here is vLLM's default."""

    model: Path
    threads: int
    eager: bool = False
    max_num_batched_tokens: int | None = None
    """``None``: vLLM's default."""
    kv_gib: float = 2.0
    """vLLM's own KV cache of each engine; the public pool of a hypic engine comes beside it."""
    hypic: dict[str, Any] = field(default_factory=dict)
    """The plugin's options."""
    timeout_s: float = 3600.0
    """Longest time that one request, or an engine's start, may take."""

    def arguments(self, context: int, *, hypic: bool, **more: Any) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` for prompts of up to ``context`` tokens.

        Raises ``click.UsageError`` when the model's own context is shorter.
        """
        longest = model_context(self.model)
        if longest is not None and context > longest:
            raise click.UsageError(
                f"{self.model.name} has a context of {longest} tokens, this benchmark needs {context}: "
                "ask for fewer or shorter segments"
            )
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "max_model_len": max(context, min(longest or CONTEXT, CONTEXT)),
            "kv_cache_memory_bytes": int(self.kv_gib * 2**30),
        }
        if self.eager:
            arguments["enforce_eager"] = True
        if self.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.max_num_batched_tokens
        if hypic:
            arguments["attention_backend"] = "hypic"
            if self.hypic:
                arguments["additional_config"] = {"hypic": self.hypic}
        return arguments | more


def model_context(model: Path) -> int | None:
    """Longest context that the model's ``config.json`` names, or ``None``.

    Raises ``click.UsageError`` when the folder holds no model.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as e:
        raise click.UsageError(f"--model {model}: no config.json there, so this is no model's folder") from e
    except ValueError as e:
        raise click.UsageError(f"--model {model}: its config.json is no JSON: {e}") from e
    for part in (config, config.get("text_config", {})):
        if isinstance(part, dict) and isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None


class HypicOptions(click.ParamType):
    """The plugin's options as JSON, checked."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            options = json.loads(value)
            HypicConfig.from_mapping(options)
        except (ValueError, ConfigError) as e:
            self.fail(f"{value!r}: {e}", param, ctx)
        return dict(options)


class Counts(click.ParamType):
    """Positive integers, comma-separated: ``4,8,12,16``."""

    name = "integers"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: expected integers with commas between, like 4,8,16", param, ctx)
        for number in numbers:
            if not self.low <= number <= self.high:
                self.fail(f"{number} is not between {self.low} and {self.high}", param, ctx)
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r}: a number stands there twice", param, ctx)
        return numbers


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


SHORTEST = 64
"""Tokens of the shortest segment that is certain to be cached with the default seam and minimum."""


def _shape(text: str) -> tuple[int, int]:
    segments, tokens = text.split("x")
    return int(segments), int(tokens)


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def engine_options(*, kv_gib: float = 2.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of the engines; they reach the command as one ``engine: EngineSettings``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_settings(
            *,
            model: Path | None,
            size: str,
            threads: int | None,
            eager: bool,
            max_num_batched_tokens: int | None,
            kv_gib: float,
            hypic: dict[str, Any],
            timeout_s: float,
            **options: Any,
        ) -> Any:
            engine = EngineSettings(
                model=model or random_model(size),
                threads=threads or len(os.sched_getaffinity(0)),
                eager=eager,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_gib=kv_gib,
                hypic=hypic,
                timeout_s=timeout_s,
            )
            return command(engine=engine, **options)

        return _with(
            with_settings,
            click.option("--model", type=FOLDER, help="A model's folder."),
            click.option(
                "--size",
                type=click.Choice(list(SIZES)),
                default="150m",
                show_default=True,
                help="Size of the random Qwen3.5-shaped model when no model is given.",
            ),
            click.option(
                "--threads", type=click.IntRange(1, 512), help="OpenMP threads; default: all usable cores."
            ),
            click.option("--eager", is_flag=True, help="Do not compile the model (vLLM's default compiles)."),
            click.option(
                "--max-num-batched-tokens",
                type=click.IntRange(64, 1 << 20),
                help="vLLM's option of this name; default: vLLM's.",
            ),
            click.option(
                "--kv-gib",
                type=click.FloatRange(0.05, 4096),
                default=kv_gib,
                show_default=True,
                help="vLLM's KV cache of each engine; the public pool comes beside it.",
            ),
            click.option(
                "--hypic",
                type=HypicOptions(),
                default="{}",
                show_default=True,
                help="The plugin's options, as JSON.",
            ),
            click.option(
                "--timeout-s",
                type=click.FloatRange(1),
                default=3600.0,
                show_default=True,
                help="Give up when one request takes longer.",
            ),
        )

    return decorate


def repeat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--repeats`` and ``--seed``."""
    return _with(
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


def _with(command: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def needed_context(shapes: Sequence[tuple[int, int]], beside: int) -> int:
    """Context of the longest prompt: ``shapes`` are (segments, tokens each), ``beside`` everything else."""
    return max(segments * tokens for segments, tokens in shapes) + beside
