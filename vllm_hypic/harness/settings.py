"""Options of the command line that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ..config.engine import HypicConfig
from ..errors import ConfigError

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
    dtype: str | None = None
    """vLLM's option of this name; ``None``: vLLM's default, by which a float32 model runs in bfloat16."""
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
        for name in ("max_num_batched_tokens", "dtype", "kv_cache_dtype"):
            if (given := getattr(self, name)) is not None:
                arguments[name] = given
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
        raise click.UsageError(f"{model}: expected a model's folder, with a config.json") from e
    except ValueError as e:
        raise click.UsageError(f"{model}: its config.json is not JSON: {e}") from e
    for part in (config, config.get("text_config", {})):
        if isinstance(part, dict) and isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None


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


def with_options(command: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return ``command`` with click's ``options``, in this order in ``--help``."""
    for option in reversed(options):
        command = option(command)
    return command
