"""Options of the command line that benchmarks share, and the stock engines that an option describes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engines import Engine
from vllm_hypic.harness.settings import EngineSettings, HypicOptions, JsonObject, with_options

from .sizes import SIZES, random_model

OF_ENGINES = ("max_num_batched_tokens", "kv_gib", "dtype", "kv_cache_dtype")
"""Fields of :class:`EngineSettings` that are options of engines only."""
SHORTEST = 64
"""Tokens of the shortest segment that is certain to be cached with the default seam and minimum."""


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


@dataclass(frozen=True)
class Served:
    """Settings that engines and servers share."""

    model: Path | None
    """Folder of the model; ``None`` for the random model of ``size``."""
    size: str
    threads: int
    eager: bool
    hypic: dict[str, Any]
    """Options of the plugin."""
    timeout_s: float

    def folder(self) -> Path:
        """Return the model's folder, and make the random model if it does not exist."""
        return self.model or random_model(self.size)


def served_options(*, timeout_s: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of :class:`Served`, which the command gets as ``served``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_served(*, threads: int | None, **options: Any) -> Any:
            own = {f.name: options.pop(f.name) for f in fields(Served) if f.name != "threads"}
            threads = threads or len(os.sched_getaffinity(0))
            return command(served=Served(threads=threads, **own), **options)

        return with_options(
            with_served,
            click.option(
                "--model",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="A model's folder.",
            ),
            click.option(
                "--size",
                type=click.Choice(list(SIZES)),
                default="150m",
                show_default=True,
                help="Size of the random model that runs without --model, in the shape of Qwen3.5, Granite 4 "
                "(mamba2), Kimi-Linear (kda), Ring 2.5 (lightning) or Gemma 3 (windows).",
            ),
            click.option(
                "--threads", type=click.IntRange(1, 512), help="OpenMP threads; default: all usable cores."
            ),
            click.option("--eager", is_flag=True, help="Do not compile the model (vLLM's default compiles)."),
            click.option(
                "--hypic",
                type=HypicOptions(),
                default="{}",
                show_default=True,
                help="The plugin's options, as JSON.",
            ),
            click.option(
                "--timeout-s",
                type=click.FloatRange(0, min_open=True),
                default=timeout_s,
                show_default=True,
                help="Limit on the seconds of a request.",
            ),
        )

    return decorate


def engine_options(*, kv_gib: float = 2.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds engine options, which the command gets as ``engine: EngineSettings``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_settings(*, served: Served, **options: Any) -> Any:
            own: dict[str, Any] = {name: options.pop(name) for name in OF_ENGINES}
            own |= {"eager": served.eager, "hypic": served.hypic, "timeout_s": served.timeout_s}
            engine = EngineSettings(served.folder(), served.threads, **own)
            return command(engine=engine, **options)

        engine_only = with_options(
            with_settings,
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
                help="GiB of vLLM's KV cache in each engine; the pool comes on top.",
            ),
            click.option(
                "--dtype",
                help="vLLM's option of this name; default: auto, by which a float32 model runs in bfloat16.",
            ),
            click.option(
                "--kv-cache-dtype",
                help="vLLM's option of this name; default: the model's. Records have the same dtype.",
            ),
        )
        return served_options(timeout_s=3600.0)(engine_only)

    return decorate


def stock_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option ``--stock JSON``, which may be repeated and which the command gets as ``variants``."""
    return click.option(
        "--stock",
        "variants",
        type=JsonObject(("model", "enable_prefix_caching", "kv_cache_memory_bytes")),
        multiple=True,
        default=("{}",),
        show_default=True,
        help='A stock engine with more options of LLM, such as {"prefix_match_unit": 16}; repeatable.',
    )(command)


def stock_engines(
    settings: EngineSettings, context: int, variants: Sequence[Mapping[str, Any]], **options: Any
) -> list[Engine]:
    """Return an engine of stock vLLM with prefix caching and ``options`` for each of the ``variants``."""
    return [
        Engine(
            settings,
            context,
            hypic=False,
            name=" ".join(["stock", *(f"{key}={value}" for key, value in more.items())]),
            enable_prefix_caching=True,
            **{**options, **more},
        )
        for more in variants
    ]
