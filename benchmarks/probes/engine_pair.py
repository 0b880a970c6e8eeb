"""The two engines of a probe, the prompts that it looks at, and one prompt through every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import click

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.eval.fitting import traits
from vllm_hypic.eval.methods import FULL, Method
from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness import engine_calls as engine_calls
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.fidelity import Distance, GateFailed, top
from vllm_hypic.harness.generators import FIRST_SEED, Generator, find_generator
from vllm_hypic.harness.settings import EngineSettings

from ..lib.gate import checked_distance
from ..lib.prompts import HEAD, QUESTION, Shape, Writer
from .engine_calls import Layers, Observation, layers, observe

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
    trust_generator: bool = False
    """Whether a generator that somebody else put beside the model may run."""

    @property
    def least(self) -> int:
        """Reused tokens of the shortest segment that has a record."""
        return HypicConfig.from_mapping(self.engine.hypic).min_segment_tokens


@dataclass(frozen=True)
class MethodRun:
    """One method on one prompt; ``distance``: of its first token from full recompute's."""

    seen: Observation
    distance: Distance


@dataclass(frozen=True)
class PromptRuns:
    """One prompt: full recompute, full recompute with other chunks, and the methods in their order."""

    prompt: Prompt
    full: Observation
    noise: MethodRun
    methods: tuple[MethodRun, ...]


@dataclass(frozen=True)
class EnginePair:
    """Running engines."""

    probe: Probe
    engine: Engine
    noise: Engine
    layers: Layers

    def prompts(self, segments: int, tokens: int) -> list[Prompt]:
        probe = self.probe
        generator = find_generator(probe.engine.model, trust=probe.trust_generator)
        return make_prompts(generator, self.engine.vocabulary, probe.prompts, segments, tokens, probe.seed)

    def run(self, prompt: Prompt, *, kv: bool = False) -> PromptRuns:
        """Raises ``GateFailed`` where less was reused than the method says."""
        full = self._observe(self.engine, FULL, prompt, None, kv)
        wanted = top(full.logprobs)
        noise = self._observe(self.noise, FULL, prompt, wanted, kv)
        methods = []
        for method in self.probe.methods:
            seen = self._observe(self.engine, method, prompt, wanted, kv)
            methods.append(MethodRun(seen, checked_distance(full.logprobs, seen.logprobs, method.name)))
        return PromptRuns(
            prompt,
            full,
            MethodRun(noise, checked_distance(full.logprobs, noise.logprobs, "noise")),
            tuple(methods),
        )

    def warm(self, method: Method, prompt: Prompt) -> None:
        """Answer once, so that the prompt's records are there."""
        ask = method.ask(prompt, self.engine.separator, max_tokens=1, logprobs_of=None)
        self.engine.call(engine_calls.generate, [ask])

    def _observe(
        self, engine: Engine, method: Method, prompt: Prompt, wanted: list[int] | None, kv: bool
    ) -> Observation:
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


def make_prompts(
    generator: Generator | None, vocabulary: Sequence[int], count: int, segments: int, tokens: int, seed: int
) -> list[Prompt]:
    """``count`` prompts over ``segments`` documents of ``tokens`` tokens, random ones of the vocabulary where
    there is no generator; the same seed, the same prompts."""
    if generator is not None:
        return [_question(generator, seed + i, segments, tokens) for i in range(count)]
    writer = Writer(vocabulary, seed)
    return [writer.prompt(segments, tokens, head=HEAD, question=QUESTION) for _ in range(count)]


def _question(generator: Generator, seed: int, segments: int, tokens: int) -> Prompt:
    kinds = generator.LEARNED if segments > 1 else generator.LEARNED[:1]
    kind = kinds[seed % len(kinds)]
    parts = generator.prompt(FIRST_SEED + seed, segments, tokens, kind, facts=generator.FACTS)
    return Prompt(tuple(parts["system"]), tuple(map(tuple, parts["docs"])), tuple(parts["question"]))


def require_long(probe: Probe, tokens: int) -> None:
    """Refuse segments in which too little is left to reuse; raises ``click.UsageError``."""
    for method in probe.methods:
        if (link := method.linked) is None:
            continue
        if tokens - link.head - link.tail < probe.least:
            raise click.UsageError(
                f"segments of {tokens} tokens: {method.name} recomputes {link.head + link.tail} of them, and "
                f"fewer than {probe.least} tokens (min_segment_tokens) are left to reuse"
            )


@contextmanager
def running_pair(probe: Probe, shapes: Sequence[Shape]) -> Iterator[EnginePair]:
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
        yield EnginePair(probe, engine, noise, engine.call(layers))


def _require_honoured(probe: Probe, engine: Engine) -> None:
    found = traits(engine)
    for method in probe.methods:
        if (link := method.linked) is not None and (reason := link.refused_by(found)):
            raise click.UsageError(f"--methods: {reason}")
