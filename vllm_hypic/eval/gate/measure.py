"""Measures a model with two engines in sequence, so that memory holds a single engine at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config.engine import HypicConfig, config_of
from ...harness.engine_calls import FORCING, found_segments
from ...harness.engines import Engine, running
from ...harness.fidelity import GateFailed, require_cold_equals_warm
from ...harness.report import Steps
from ...harness.settings import EngineSettings
from ..fitting import fitting, refused
from ..methods import FULL, Method
from ..runner import MethodAnswer, evaluate, noise_engine
from ..scores import likelihood, score
from ..task import ChatTemplate, Example, Prompt
from .criteria import Answers, Distances, Numbers, Reuse, Texts
from .fixed_set import TaskSet
from .identity import Subject, subject_of

NOISE_CHUNK = 256
"""Tokens in a step of the noise engine, few enough to cut prompts of the fixed set into several chunks."""


class MeasureError(RuntimeError):
    """The model cannot be measured; the message says why."""


@dataclass(frozen=True)
class GateEngines:
    """Settings of the engines that measure a model."""

    settings: EngineSettings
    context: int
    more: Mapping[str, Any]
    """Further options of ``vllm.LLM``, for both engines."""

    def hypic(self) -> Engine:
        return Engine(
            self.settings, self.context, hypic=True, **{"logits_processors": [FORCING], **self.more}
        )

    def noise(self) -> Engine:
        """Return a stock engine that cuts prompts into other chunks."""
        return noise_engine(self.settings, self.context, NOISE_CHUNK, **self.more)


@dataclass(frozen=True)
class GateMeasurement:
    subject: Subject
    """The subject, with the link options of the engine."""
    numbers: dict[Method, Numbers]
    """Numbers by method, in the requested order; the methods are those on this engine (:meth:`Method.on`)."""
    chat: bool
    left_out: int
    """Count of prompts that are longer than the engine's context."""
    described: dict[str, Any]


def measure(
    engines: GateEngines,
    methods: Sequence[Method],
    make: Callable[[bool], Sequence[TaskSet]],
    *,
    chat: bool | None,
    template: ChatTemplate,
    steps: Steps,
) -> GateMeasurement:
    """Measure ``methods`` on the tasks of ``make(chat)``; ``chat=None`` uses a chat template if the model has
    one.

    ``steps`` counts (task, method) pairs; full recompute and the noise count as methods.  Raises
    ``EngineError`` if an engine does not start or dies, ``TasksError`` if no prompt fits the context.  Also
    raises ``PoolError`` if a prompt does not fit the pool, and :class:`MeasureError`.
    """
    steps.show("starting vLLM with hypic")
    with running(engine := engines.hypic()):
        methods = [method.on(engine.link_defaults) for method in methods]
        if chat is None:
            chat = engine.call(_has_chat_template)
        asked, left_out = _encoded(engine, make(chat), chat, template)
        examples = [example for one in asked for example in one.examples]
        steps.done(left_out * (len(methods) + 2))
        subject = engine.call(_subject)
        faults = {method: [reason] for method, reason in refused(engine, methods).items()}
        steps.done(len(faults) * len(examples))
        kept = [method for method in methods if method not in faults]
        steps.show("cold against warm")
        faults |= {m: _cold_against_warm(engine, m, [one.examples[0] for one in asked]) for m in kept}
        steps.show("full recompute against reuse")
        outcomes = evaluate(engine, examples, kept, done=steps.done)
        cut = {method: _cut(engine, method, examples) for method in kept}
        described = engine.described
    minimum = HypicConfig.from_mapping(engines.settings.hypic).min_segment_tokens
    full = outcomes[FULL]
    if (broken := _not_finite(full)) is not None:
        raise MeasureError(f"{engines.settings.model.name} is broken without reuse: {broken}")
    steps.show("starting stock vLLM")
    with running(engine := engines.noise()):
        steps.show("full recompute in other chunks")
        noise = Distances.of(full, evaluate(engine, examples, [], done=steps.done, references=full)[FULL])
    numbers = {m: Numbers(tuple(faults[m]), noise=noise) for m in methods}
    for method in kept:
        found = outcomes[method]
        if (broken := _not_finite(found)) is not None:
            numbers[method] = replace(numbers[method], faults=(*faults[method], broken))
            continue
        numbers[method] = replace(
            numbers[method],
            answers=_answers(asked, full, found),
            texts=_texts(asked, full, found),
            reuse=_reuse(method, cut[method], found, minimum),
            distances=Distances.of(full, found),
        )
    return GateMeasurement(subject, numbers, chat, left_out, described)


@dataclass(frozen=True)
class _Asked:
    """A set of tasks as token ids."""

    tasks: TaskSet
    examples: list[Example]


def _parts(
    asked: Sequence[_Asked], *outcomes: Sequence[MethodAnswer]
) -> Iterator[tuple[_Asked, list[Sequence[MethodAnswer]]]]:
    """Yield each set with its part of each of ``outcomes``, in which all sets stand end to end."""
    begin = 0
    for one in asked:
        end = begin + len(one.examples)
        yield one, [each[begin:end] for each in outcomes]
        begin = end


def _encoded(
    engine: Engine, sets: Sequence[TaskSet], chat: bool, template: ChatTemplate
) -> tuple[list[_Asked], int]:
    """Return the prompts that fit the context, and the count of prompts that do not."""
    asked = [_Asked(one, fitting(engine, one.name, one.tasks, chat=chat, template=template)) for one in sets]
    return asked, sum(len(one.tasks.tasks) - len(one.examples) for one in asked)


def _cold_against_warm(engine: Engine, method: Method, examples: Sequence[Example]) -> list[str]:
    """Return the faults of these prompts, each asked with nothing cached and then again."""
    faults = []
    for example in examples:
        ask = method.ask(example.prompt, engine.separator, max_tokens=1, logprobs_of=None)
        try:
            require_cold_equals_warm(engine, replace(ask, fresh=False))
        except GateFailed as e:
            faults.append(f"a prompt of the family {example.task.family!r}: {e}")
    return faults


def _not_finite(outcomes: Sequence[MethodAnswer]) -> str | None:
    """Return a sentence if logprobs are not finite, else ``None``."""
    bad = [v for o in outcomes for v in o.logprobs.values() if not math.isfinite(v)]
    return f"{len(bad)} logprobs of first tokens are no numbers ({bad[0]})" if bad else None


def _answers(
    asked: Sequence[_Asked], full: Sequence[MethodAnswer], found: Sequence[MethodAnswer]
) -> tuple[Answers, ...]:
    """Return the scores of ``found`` and of full recompute, for every set of questions."""
    answers = []
    for one, (right, other) in _parts(asked, full, found):
        if (metric := one.tasks.metric) is None:
            continue
        base, reuse = (
            [metric.of(score(e.task, o, r)) for e, o, r in zip(one.examples, outcomes, right, strict=True)]
            for outcomes in (right, other)
        )
        answers.append(Answers.of(one.tasks.name, metric.label, base, reuse))
    return tuple(answers)


def _texts(
    asked: Sequence[_Asked], full: Sequence[MethodAnswer], found: Sequence[MethodAnswer]
) -> tuple[Texts, ...]:
    """Return the continuations' likelihoods in ``found`` and in full recompute, for every family of texts."""
    texts = []
    for one, (right, other) in _parts(asked, full, found):
        if one.tasks.metric is not None:
            continue
        for family in dict.fromkeys(e.task.family for e in one.examples):
            base, reuse = (
                [
                    likelihood(o, r).nll
                    for e, o, r in zip(one.examples, outcomes, right, strict=True)
                    if e.task.family == family
                ]
                for outcomes in (right, other)
            )
            texts.append(Texts.of(family, base, reuse))
    return tuple(texts)


def _cut(engine: Engine, method: Method, examples: Sequence[Example]) -> list[Prompt]:
    """Return the prompts, cut into the segments that this method finds."""
    prompts = [example.prompt for example in examples]
    if method.mode == "off":
        return prompts
    asks = [method.ask(prompt, engine.separator, max_tokens=1, logprobs_of=None) for prompt in prompts]
    return [
        Prompt(
            tuple(ask.tokens[: spans[0][0]]) if spans else (),
            tuple(tuple(ask.tokens[start:stop]) for start, stop in spans),
            tuple(ask.tokens[spans[-1][1] :]) if spans else tuple(ask.tokens),
        )
        for ask, spans in zip(asks, engine.call(found_segments, asks), strict=True)
    ]


def _reuse(method: Method, prompts: Sequence[Prompt], found: Sequence[MethodAnswer], minimum: int) -> Reuse:
    reusable = sum(method.reusable(prompt, minimum) for prompt in prompts)
    return Reuse(sum(o.cached for o in found), reusable)


# -- functions that run in the engine's process ------------------------------------------------------


def _has_chat_template(llm: Any) -> bool:
    return getattr(llm.get_tokenizer(), "chat_template", None) is not None


def _subject(llm: Any) -> Subject:
    vllm_config = llm.llm_engine.vllm_config
    return subject_of(vllm_config, config_of(vllm_config))
