"""Options that all probes share, and how their results are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from vllm_hypic.eval.methods import Method
from vllm_hypic.harness.generators import EXAMPLE, trust_option
from vllm_hypic.harness.settings import EngineSettings, HypicOptions, model_name, with_options
from vllm_hypic.primitives.policies import LinkError

from ..answers.methods import link_method
from ..lib import report
from ..lib.report import described
from ..lib.sizes import SIZES, random_model
from .engine_pair import EnginePair, Probe

METHODS = "naive-8,block,epic-0,epic-4,epic-16,hypic-8,hypic-16,seam-4-0+16"

DIGITS = 4


class Methods(click.ParamType):
    """Names of methods with commas between: ``hypic-8,epic-16,naive-8,block``."""

    name = "methods"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Method, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(link_method(part.strip()) for part in value.split(","))
        except LinkError as e:
            self.fail(str(e), param, ctx)
        if any(method.link is None for method in found):
            self.fail("full recompute is the reference: name methods that reuse records", param, ctx)
        if len(set(found)) < len(found):
            self.fail(f"{value!r}: expected each method once", param, ctx)
        return found


def probe_options(methods: str | None = METHODS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options of :class:`Probe`; they reach the command as one ``probe``.

    ``methods``: the default of ``--methods``; ``None``: the probe compares none.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_probe(
            *,
            model: Path | None,
            size: str | None,
            threads: int,
            kv_gib: float,
            hypic: dict[str, Any],
            timeout_s: float,
            max_num_batched_tokens: int,
            noise_chunk: int,
            prompts: int,
            seed: int,
            trust_generator: bool,
            methods: tuple[Method, ...] = (),
            **options: Any,
        ) -> Any:
            if model is not None and size is not None:
                raise click.UsageError("--model and --size: expected only one of the two")
            if noise_chunk == max_num_batched_tokens:
                raise click.UsageError(
                    f"--noise-chunk {noise_chunk}: the same chunks show no noise; "
                    "take another number than --max-num-batched-tokens"
                )
            engine = EngineSettings(
                model=model or (EXAMPLE / "model" if size is None else random_model(size)),
                threads=threads,
                eager=True,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_gib=kv_gib,
                hypic=hypic,
                timeout_s=timeout_s,
            )
            probe = Probe(engine, methods, prompts, seed, noise_chunk, trust_generator)
            return command(probe=probe, **options)

        shared = [
            click.option(
                "--model",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="A model's folder; default: the demo model.",
            ),
            click.option("--size", type=click.Choice(list(SIZES)), help="Size of a random model."),
            click.option("--prompts", type=click.IntRange(1, 10000), default=20, show_default=True),
            click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
            click.option(
                "--max-num-batched-tokens",
                type=click.IntRange(64, 1 << 20),
                default=2048,
                show_default=True,
                help="Prefill chunk of the measured engine.",
            ),
            click.option(
                "--noise-chunk",
                type=click.IntRange(64, 1 << 20),
                default=200,
                show_default=True,
                help="Prefill chunk of the noise engine: not a multiple of 64, as kernels split there.",
            ),
            click.option("--threads", type=click.IntRange(1, 512), default=1, show_default=True),
            click.option(
                "--kv-gib",
                type=click.FloatRange(0.05, 4096),
                default=0.5,
                show_default=True,
                help="GiB of vLLM's KV cache in each engine; the pool comes on top.",
            ),
            click.option("--hypic", type=HypicOptions(), default="{}", help="The plugin's options, as JSON."),
            click.option("--timeout-s", type=click.FloatRange(0, min_open=True), default=1200.0),
            trust_option,
        ]
        if methods is not None:
            shared.insert(2, click.option("--methods", type=Methods(), default=methods, show_default=True))
        return with_options(with_probe, *shared)

    return decorate


def write(
    path: Path | None, name: str, eyes_facts: dict[str, Any], probe: Probe, results: Any, **more: Any
) -> None:
    """Write the JSON report of the probe ``name``, if there is a ``path``; ``more``: further settings."""
    if path is None:
        return
    settings = {"model": model_name(probe.engine.model), "probe": probe, **more}
    found = report.report(
        f"probe {name}",
        settings,
        {"engines": eyes_facts, **results},
        threads=probe.engine.threads,
        module="benchmarks.probes",
    )
    report.write_json(path, _rounded(found))


def _rounded(value: Any) -> Any:
    """Plain JSON values with :data:`DIGITS` significant digits: a report of many layers and zones is long."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def facts(pair: EnginePair) -> dict[str, Any]:
    """What the report says of the engines."""
    return described(pair.engine, pair.noise)
