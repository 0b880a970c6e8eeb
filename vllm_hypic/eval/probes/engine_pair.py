"""The two engines of a probe, and one prompt through every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from ...config.engine import HypicConfig
from ...harness import engine_calls as bench_beside
from ...harness.engines import Engine, running
from ...harness.fidelity import Distance, top
from ...harness.gate import GateFailed, checked_distance
from ...harness.prompts import Prompt, Shape
from ...harness.settings import EngineSettings
from ...primitives.policies import parse_link
from ..methods import FULL, Method
from ..pool_batches import traits
from .engine_calls import Layers, Seen, layers, observe
from .prompts import make_prompts

SPARE = 192
"""Context of a prompt beside its documents: system prompt, question, an answer."""
REQUESTS = 4
"""Requests that an engine takes at once: a prompt is one, its missing segments are others."""


@dataclass(frozen=True)
class Probe:
    """What is looked at: ``methods`` on ``prompts`` prompts of a model."""

    engine: EngineSettings
    methods: tuple[Method, ...]
    prompts: int
    seed: int
    noise_chunk: int
    """``max_num_batched_tokens`` of the engine that shows the noise."""

    @property
    def least(self) -> int:
        """Reused tokens of the shortest segment that has a record."""
        return HypicConfig.from_mapping(self.engine.hypic).min_segment_tokens


@dataclass(frozen=True)
class Look:
    """One method on one prompt; ``distance``: of its first token from full recompute's."""

    seen: Seen
    distance: Distance


@dataclass(frozen=True)
class Looks:
    """One prompt: full recompute, full recompute with other chunks, and the methods in their order."""

    prompt: Prompt
    full: Seen
    noise: Look
    methods: tuple[Look, ...]


@dataclass(frozen=True)
class Eyes:
    """Running engines."""

    probe: Probe
    engine: Engine
    noise: Engine
    layers: Layers

    def prompts(self, segments: int, tokens: int) -> list[Prompt]:
        probe = self.probe
        return make_prompts(
            probe.engine.model, self.engine.vocabulary, probe.prompts, segments, tokens, probe.seed
        )

    def look(self, prompt: Prompt, *, kv: bool = False) -> Looks:
        """Raises :class:`~vllm_hypic.harness.gate.GateFailed` where less was reused than the method says."""
        full = self._see(self.engine, FULL, prompt, None, kv)
        wanted = top(full.logprobs)
        noise = self._see(self.noise, FULL, prompt, wanted, kv)
        methods = []
        for method in self.probe.methods:
            seen = self._see(self.engine, method, prompt, wanted, kv)
            methods.append(Look(seen, checked_distance(full.logprobs, seen.logprobs, method.name)))
        return Looks(
            prompt,
            full,
            Look(noise, checked_distance(full.logprobs, noise.logprobs, "noise")),
            tuple(methods),
        )

    def warm(self, method: Method, prompt: Prompt) -> None:
        """Answer once, so that the prompt's records are there."""
        ask = method.ask(prompt, self.engine.separator, max_tokens=1, logprobs_of=None)
        self.engine.call(bench_beside.generate, [ask])

    def _see(
        self, engine: Engine, method: Method, prompt: Prompt, wanted: list[int] | None, kv: bool
    ) -> Seen:
        ask = method.ask(prompt, engine.separator, max_tokens=1, logprobs_of=wanted)
        if method.link is not None:
            self.warm(method, prompt)
        seen = engine.call(observe, ask, len(prompt.question), kv)
        expected = method.reusable(prompt, self.probe.least)
        if seen.cached != expected:
            raise GateFailed(
                f"{method.name}: {seen.cached} tokens were reused, expected {expected}; is the pool too "
                "small (--kv-gib, --hypic)?"
            )
        return seen


def require_long(probe: Probe, tokens: int) -> None:
    """Refuse segments in which too little is left to reuse; raises ``click.UsageError``."""
    for method in probe.methods:
        if method.link is None:
            continue
        link = parse_link(method.link, method.seam)
        if tokens - link.head - link.tail < probe.least:
            raise click.UsageError(
                f"segments of {tokens} tokens: {method.name} recomputes {link.head + link.tail} of them, and "
                f"what is left is computed, too, where it is shorter than {probe.least} (min_segment_tokens)"
            )


@contextmanager
def open_eyes(probe: Probe, shapes: Sequence[Shape]) -> Iterator[Eyes]:
    """The engines of ``probe``, up, for prompts with documents of these ``shapes``."""
    # Observing needs the model uncompiled; without the prefix cache nothing else is reused, and the state
    # after the prompt lies in one place.
    settings = replace(probe.engine, eager=True)
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": REQUESTS}
    context = max(s.segments * (s.tokens + 1) for s in shapes) + SPARE
    engine = Engine(settings, context, hypic=True, **options)
    options["max_num_batched_tokens"] = probe.noise_chunk
    noise = Engine(settings, context, hypic=True, name="noise", **options)
    with running(engine, noise):
        _require_honoured(probe, engine)
        yield Eyes(probe, engine, noise, engine.call(layers))


def _require_honoured(probe: Probe, engine: Engine) -> None:
    found = traits(engine)
    for method in probe.methods:
        if method.link is not None and (reason := parse_link(method.link, method.seam).refused_by(found)):
            raise click.UsageError(f"--methods: {reason}")
