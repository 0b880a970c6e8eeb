"""Options of the command line that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ..config.engine import HypicConfig
from ..errors import ConfigError
from .sizes import SIZES, random_model

CONTEXT = 32768
"""Least context of engines, in tokens, if the model has as much.  Most benchmarks use the same context, so
that vLLM's cache of compiled models serves them all."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of engines; all other settings are vLLM's defaults."""

    model: Path
    threads: int
    eager: bool = False
    max_num_batched_tokens: int | None = None
    """vLLM's option of this name; ``None``: vLLM's default."""
    kv_gib: float = 2.0
    """GiB of vLLM's own KV cache in each engine, without the public pool of a hypic engine."""
    kv_cache_dtype: str | None = None
    """vLLM's option of this name; ``None``: vLLM's default."""
    hypic: dict[str, Any] = field(default_factory=dict)
    """Options of the plugin."""
    timeout_s: float = 3600.0
    """Limit, in seconds, on the time of a request or of an engine's start."""

    def arguments(self, context: int, *, hypic: bool, **more: Any) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM`` for prompts of up to ``context`` tokens.

        Raises ``click.UsageError`` if the model's own context is shorter.
        """
        longest = model_context(self.model)
        if longest is not None and context > longest:
            raise click.UsageError(
                f"{self.model.name} has a context of {longest} tokens, but this command needs {context}: "
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
        if self.kv_cache_dtype is not None:
            arguments["kv_cache_dtype"] = self.kv_cache_dtype
        if hypic:
            arguments["attention_backend"] = "hypic"
            if self.hypic:
                arguments["additional_config"] = {"hypic": self.hypic}
        return arguments | more


def model_context(model: Path) -> int | None:
    """Return the longest context that the model's ``config.json`` names, or ``None``.

    Raises ``click.UsageError`` if the folder holds no model.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as e:
        raise click.UsageError(f"--model {model}: no config.json there, so this is no model's folder") from e
    except ValueError as e:
        raise click.UsageError(f"--model {model}: its config.json is not JSON: {e}") from e
    for part in (config, config.get("text_config", {})):
        if isinstance(part, dict) and isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None


def has_chat_template(model: Path) -> bool:
    """Whether the tokenizer in the folder has a chat template."""
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((model / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):
        return False


def model_folder(name: str) -> Path:
    """Return the folder of a model, which ``name`` gives as a path or as a name in the hub's cache.

    Raises ``click.UsageError`` if the model is not on this machine.
    """
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(name, "config.json")
        except HFValidationError:
            found = None
        if not isinstance(found, str):
            raise click.UsageError(
                f"{name!r} is neither a folder nor a model in this machine's hub cache (run hf download)"
            )
        path = Path(found).parent
    model_context(path)
    return path


def model_name(model: Path) -> str:
    """Return the folder's name for reports, or the parent folder's name if the folder is called ``model``."""
    found = model.absolute()
    return found.parent.name if found.name == "model" else found.name


class HypicOptions(click.ParamType):
    """Options of the plugin as JSON, which are validated."""

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


OF_ENGINES = ("max_num_batched_tokens", "kv_gib", "kv_cache_dtype")
"""Fields of :class:`EngineSettings` that are options of engines only."""
SHORTEST = 64
"""Tokens of the shortest segment that is certain to be cached with the default seam and minimum."""


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
                help="Give up when one request takes longer.",
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
                "--kv-cache-dtype",
                help="vLLM's option of this name; default: the model's (records follow it).",
            ),
        )
        return served_options(timeout_s=3600.0)(engine_only)

    return decorate


def with_options(command: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return ``command`` with click's ``options``, in this order in ``--help``."""
    for option in reversed(options):
        command = option(command)
    return command
