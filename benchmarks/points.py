"""Time to first token at one point: full recompute, vLLM's prefix caching, hypic cold, hypic warm.

A repeat draws fresh documents and a question. In turns:

* ``stock``: stock vLLM is asked; nothing of it can be in its prefix cache;
* ``prefix``: the same engine is asked for the same documents in another order, with another question;
* ``cold``: hypic is asked what ``stock`` was;
* ``warm``: hypic is asked what ``prefix`` was.

Engines swap turns from repeat to repeat. Repeats go round all points before the next one starts, so that a
machine that becomes slower or faster does so for all points alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hypic.eval.task import Prompt
from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine
from vllm_hypic.harness.fidelity import Distance
from vllm_hypic.harness.report import Steps

from .lib import gate
from .lib.prompts import HEAD, QUESTION, Shape, Writer
from .lib.report import seconds
from .lib.stats import Spread

KINDS = ("stock", "prefix", "cold", "warm")
LABELS = {
    "stock": "stock vLLM, full recompute",
    "prefix": "stock vLLM, prefix caching",
    "cold": "hypic, cold",
    "warm": "hypic, warm",
}


@dataclass(frozen=True)
class ShapeTimes:
    """What was measured at one shape. Times in seconds; ``cached``: tokens read from a cache, by kind."""

    shape: Shape
    prompt_tokens: int
    seconds: dict[str, Spread]
    speedup: dict[str, Spread]
    """Stock over each kind, repeat by repeat."""
    cached: dict[str, int]
    distance: Distance
    """Distance of the warm first token from stock vLLM's."""


def measure(
    stock: Engine,
    hypic: Engine,
    shapes: Sequence[Shape],
    repeats: int,
    seed: int,
    steps: Steps,
) -> list[ShapeTimes]:
    """All shapes; raises :class:`~vllm_hypic.harness.fidelity.GateFailed` when an answer is wrong."""
    writer = Writer(hypic.vocabulary, seed)
    distances: list[Distance] = []
    for shape in shapes:
        steps.show(f"{shape}: gate")
        distances.append(_gate(stock, hypic, shape, writer))
        steps.done()
    answers: list[list[dict[str, Answer]]] = [[] for _ in shapes]
    for repeat in range(repeats):
        for shape, found in zip(shapes, answers, strict=True):
            steps.show(f"{shape}: repeat {repeat + 1}")
            found.append(_turn(stock, hypic, shape, writer, hypic_first=repeat % 2 == 1))
            steps.done()
    return [_point(s, f, d) for s, f, d in zip(shapes, answers, distances, strict=True)]


def rounds(shapes: int, repeats: int) -> int:
    """Steps of progress that :func:`measure` takes."""
    return shapes * (repeats + 1)


def _gate(stock: Engine, hypic: Engine, shape: Shape, writer: Writer) -> Distance:
    """Correctness, and the warm-up of this shape."""
    first = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
    again = first.reordered(writer.order(shape.segments), writer.document(QUESTION))
    gate.require_cold_equals_warm(hypic, Ask(first.marked(hypic.separator)))
    stock.ask(Ask(first.plain()))
    ask = Ask(again.marked(hypic.separator))
    gate.require_reuse(hypic.ask(ask), shape.segments, shape.tokens, hypic.link())
    distance = gate.first_token_distance(stock, again.plain(), hypic, ask)
    gate.require_close(distance)
    return distance


def _turn(
    stock: Engine, hypic: Engine, shape: Shape, writer: Writer, *, hypic_first: bool
) -> dict[str, Answer]:
    """One repeat; an answer of every kind."""
    first = writer.prompt(shape.segments, shape.tokens, head=HEAD, question=QUESTION)
    again = first.reordered(writer.order(shape.segments), writer.document(QUESTION))
    found: dict[str, Answer] = {}

    def ask_stock() -> None:
        found["stock"] = stock.ask(Ask(first.plain()))
        found["prefix"] = stock.ask(Ask(again.plain()))

    def ask_hypic() -> None:
        found["cold"] = hypic.ask(_marked(first, hypic))
        found["warm"] = hypic.ask(_marked(again, hypic))

    for turn in (ask_hypic, ask_stock) if hypic_first else (ask_stock, ask_hypic):
        turn()
    gate.require_fresh(found["stock"], "stock vLLM")
    gate.require_fresh(found["cold"], "a cold request")
    gate.require_reuse(found["warm"], shape.segments, shape.tokens, hypic.link())
    return found


def _marked(prompt: Prompt, hypic: Engine) -> Ask:
    return Ask(prompt.marked(hypic.separator))


def _point(shape: Shape, answers: Sequence[dict[str, Answer]], distance: Distance) -> ShapeTimes:
    times = {kind: Spread.of([a[kind].first_token_s for a in answers]) for kind in KINDS}
    return ShapeTimes(
        shape,
        answers[-1]["stock"].prompt_tokens,
        times,
        {kind: times["stock"].over(times[kind]) for kind in KINDS},
        {kind: answers[-1][kind].cached for kind in KINDS},
        distance,
    )


COLUMNS = ("segments x tokens", "", "median", "min", "max", "x stock", "from cache")


def rows(points: Sequence[ShapeTimes]) -> list[list[str]]:
    """Rows of a table with :data:`COLUMNS`."""
    out = []
    for point in points:
        for kind in KINDS:
            spread = point.seconds[kind]
            out.append(
                [
                    str(point.shape) if kind == KINDS[0] else "",
                    LABELS[kind],
                    *(seconds(x) for x in (spread.median, spread.min, spread.max)),
                    f"{point.speedup[kind].median:.2f}",
                    f"{point.cached[kind]} of {point.prompt_tokens}",
                ]
            )
    return out


def gate_text(points: Sequence[ShapeTimes]) -> str:
    """What the gate found, in one sentence."""
    worst = max(points, key=lambda p: p.distance.kl).distance
    return (
        "Gate passed: cold and warm answers are bit-identical, tokens were reused. "
        f"First token against stock vLLM's: KL up to {worst.kl:.2g} nats over the top 20."
    )
