"""``dtype``: what storing T and S in fewer bits costs, in the first layer, where states have a true value.

Exact T and S of every segment's interior are rounded as a record would hold them, and composed in float64
into the state after the prompt.  Beside them: the engine's own records, composed in float64 too, and the
states that the engine really has with reuse and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from vllm_hypic.eval.estimates import Estimate, mean
from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness.engine_calls import Ask
from vllm_hypic.harness.settings import model_name

from ..answers.methods import link_method, noise_name
from ..answers.tables import wide_console
from ..lib import gate, report
from ..lib.prompts import Shape
from ..lib.report import check_outputs, output_options
from ..lib.settings import SHORTEST
from ..lib.stats import mean_and_interval, relative
from .engine_calls import answered, layers
from .engine_pair import EnginePair, Probe, require_long, running_pair
from .options import facts, probe_options, write
from .truth import first_layer, refusal

if TYPE_CHECKING:
    import torch

    from vllm_hypic.backends.ops.gated_delta.reference import DeltaTokens

    Summaries = Sequence[tuple[torch.Tensor, torch.Tensor]]

TYPES = (
    ("float32", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "bfloat16"),
    ("bfloat16", "bfloat16"),
)
"""Types of T and of S; the engine's records are float16 and float32, or what `state_dtype` says."""


@dataclass(frozen=True)
class Rounding:
    """A way to the state after the prompt; ``error``: relative to the state in float64."""

    name: str
    error: Estimate
    record_bytes: int | None
    """Bytes of T and S of one segment in one layer, dead heads included; ``None``: no record is read."""


def errors(llm: Any, ask: Ask, prompt: Prompt, head: int, tail: int) -> dict[str, tuple[float, int | None]]:
    """Error and record bytes by name, for a prompt with resident records; an engine call."""
    import torch

    from vllm_hypic.pool.narrow_states import NarrowRecords

    inputs = first_layer(llm, prompt.plain())
    bounds = _bounds(prompt)
    inner = [slice(a + head, b - tail) for a, b in bounds]
    truth = inputs.state()
    exact = [(inputs[part].transition(), inputs[part].state()) for part in inner]
    found: dict[str, tuple[float, int | None]] = {}

    def add(name: str, summaries: Summaries) -> None:
        size = sum(t.nbytes for t in summaries[0])
        found[name] = relative(compose(inputs, bounds, inner, summaries).numpy(), truth.numpy()), size

    for t, s in TYPES:
        kinds = getattr(torch, t), getattr(torch, s)
        add(f"exact, T {t}, S {s}", [(a.to(kinds[0]), b.to(kinds[1])) for a, b in exact])
    name = layers(llm).linear[0]
    with answered(llm, ask) as live:
        assert live.plan is not None
        static = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        records, kind = static[name].hypic_runtime.pool.linear[name], "float32"
        slots = [p.slot for p in live.plan.points][-len(bounds) :]
        if isinstance(records, NarrowRecords):
            records, slots, kind = records.read(torch.tensor(slots)), [*range(len(slots))], "float16"
        kept = [(records.transition(slot).clone(), records.state[slot].clone()) for slot in slots]
        state = live.state(name)
    add(own := f"engine's records, T float16, S {kind}", kept)
    # What is read is wide again.
    found[own] = found[own][0], found[f"exact, T float16, S {kind}"][1]
    add("engine's records, T to bfloat16", [(t.to(torch.bfloat16), s) for t, s in kept])
    found["engine, composed"] = relative(state, truth.numpy()), None
    return found


def full_error(llm: Any, ask: Ask, plain: list[int]) -> float:
    """Error of the engine's own full recompute.  Runs in the engine's process."""
    truth = first_layer(llm, plain).state().numpy()
    with answered(llm, ask) as live:
        return relative(live.state(layers(llm).linear[0]), truth)


def _bounds(prompt: Prompt) -> list[tuple[int, int]]:
    """First and last position of every document."""
    ends = len(prompt.head) + np.cumsum([0, *map(len, prompt.documents)])
    return [(int(a), int(b)) for a, b in pairwise(ends)]


def compose(
    inputs: DeltaTokens, bounds: Sequence[tuple[int, int]], inner: Sequence[slice], summaries: Summaries
) -> torch.Tensor:
    """State after the prompt in float64: interiors from ``summaries``, all else token by token."""
    state = inputs[: bounds[0][0]].state()
    for (first, stop), part, (transition, own) in zip(bounds, inner, summaries, strict=True):
        state = inputs[first : part.start].state(state)
        state = transition.double() @ state + own.double()
        state = inputs[part.stop : stop].state(state)
    return inputs[bounds[-1][1] :].state(state)


def measure(
    pair: EnginePair, segments: int, tokens: int, seam: int, *, done: Callable[[], None] = lambda: None
) -> list[Rounding]:
    """All roundings, over all prompts, ``done`` after each.  The first layer must have a truth."""
    method = link_method(f"hypic-{seam}")
    link = method.linked
    assert link is not None
    found: dict[str, list[float]] = {}
    sizes: dict[str, int | None] = {}
    for prompt in pair.prompts(segments, tokens):
        pair.warm(method, prompt)
        ask = method.ask(prompt, pair.engine.separator, max_tokens=1, logprobs_of=None)
        for name, (error, size) in pair.engine.call(errors, ask, prompt, link.head, link.tail).items():
            found.setdefault(name, []).append(error)
            sizes[name] = size
        plain = Ask(prompt.plain())
        for name, engine in (
            ("engine, full recompute", pair.engine),
            (noise_name(pair.probe.noise_chunk), pair.noise),
        ):
            found.setdefault(name, []).append(engine.call(full_error, plain, plain.tokens))
        done()
    return [Rounding(name, mean(values), sizes.get(name)) for name, values in found.items()]


@click.command(help="Error of T and S stored in fewer bits, against a float64 scan of the first layer.")
@probe_options(None)
@click.option("--segments", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=128, show_default=True)
@click.option("--seam", type=click.IntRange(0, 1024), default=8, show_default=True, help="Seam window.")
@output_options
@gate.reporting_failures
def dtype(
    probe: Probe, segments: int, tokens: int, seam: int, json_path: Path | None, plot_path: Path | None
) -> None:
    check_outputs(json_path, plot_path)
    probe = replace(probe, methods=(link_method(f"hypic-{seam}"),))
    require_long(probe, tokens)
    to = wide_console()
    with (
        report.progress(to, probe.prompts, "starting engines") as steps,
        running_pair(probe, [Shape(segments, tokens)]) as pair,
    ):
        if reason := pair.engine.call(refusal):
            raise click.UsageError(f"nothing to measure storage types on: {reason}")
        steps.show("prompts")
        found = measure(pair, segments, tokens, seam, done=steps.done)
        described = facts(pair)
    title = f"{model_name(probe.engine.model)}, {segments} x {tokens} tokens, {probe.prompts} prompts"
    rows = [
        [r.name, mean_and_interval(r.error), "" if r.record_bytes is None else report.size(r.record_bytes)]
        for r in found
    ]
    columns = ["state of the first layer", "relative error, mean ± 95 %", "T and S of a segment"]
    to.print(report.table(title, columns, rows))
    write(json_path, "dtype", described, probe, {"dtype": found}, segments=segments, tokens=tokens, seam=seam)
    if plot_path is not None:
        from ..plots import plot_bars

        bars = {r.name: {"": r.error.value} for r in found}
        plot_bars(plot_path, bars, title=title, label="relative error of the state after the prompt")
