"""``drafts``: what speculative decoding brings composed requests, beside ordinary ones.

One document is the prompt's leading segment, whose record is exact: the composed request and the ordinary one
have the same answer in float32, and so the same drafts.  Two engines with the plugin, one of which drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_hypic.harness.engine_calls import Answer, Ask
from vllm_hypic.harness.engines import Engine, running
from vllm_hypic.harness.report import Steps, console
from vllm_hypic.harness.settings import EngineSettings

from .lib import gate, report
from .lib.prompts import BESIDE, QUESTION, Writer
from .lib.report import check_outputs, described, output_options, seconds
from .lib.settings import SHORTEST, engine_options
from .lib.stats import Spread
from .options import repeat_options


@dataclass(frozen=True)
class Decode:
    """Seconds a generated token, without drafts and with; ``gain``: how many times sooner, by repeat."""

    what: str
    alone: Spread
    drafting: Spread
    gain: Spread


@click.command(help="Decode with drafts and without, of composed and of ordinary requests.")
@engine_options()
@repeat_options
@click.option("--tokens", type=click.IntRange(SHORTEST, 65536), default=1024, show_default=True)
@click.option("--generated", type=click.IntRange(2, 4096), default=128, show_default=True)
@click.option("--drafts", "count", type=click.IntRange(1, 16), default=4, show_default=True, help="Per step.")
@click.option(
    "--draft-model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model that drafts, in place of n-grams.",
)
@output_options
@gate.reporting_failures
def drafts(
    engine: EngineSettings,
    tokens: int,
    generated: int,
    count: int,
    draft_model: Path | None,
    repeats: int,
    seed: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    context, dtype = tokens + generated + BESIDE, {"dtype": "float32"}
    if draft_model is None:
        by = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    else:
        by = {"method": "draft_model", "model": str(draft_model)}
    speculative = {"num_speculative_tokens": count, **by}
    alone = Engine(engine, context, hypic=True, name="alone", **dtype)
    drafting = Engine(engine, context, hypic=True, name="drafting", speculative_config=speculative, **dtype)
    with report.progress(console(), repeats + 1, "starting engines") as steps, running(alone, drafting):
        writer = Writer(alone.vocabulary, seed)
        rows = _measure(alone, drafting, writer, tokens, generated, repeats, steps)
        facts = described(alone, drafting)
    to = console()
    drafter = "n-grams" if draft_model is None else draft_model.name
    title = f"decode with {count} drafts by {drafter}, {engine.model.name}, {tokens} tokens before"
    table = [[r.what, seconds(r.alone.median), seconds(r.drafting.median), *_numbers(r.gain)] for r in rows]
    to.print(report.table(title, ("", "alone", "drafting", "sooner", "min", "max"), table))
    to.print("Gate passed: all four answers to a prompt have the same tokens.")
    if json_path is not None:
        settings = {"engine": engine, "tokens": tokens, "generated": generated, "repeats": repeats}
        settings |= {"seed": seed, "speculative_config": speculative}
        results: dict[str, Any] = {"decode": rows, "engines": facts}
        passed = {"same_tokens": True}
        report.write_json(
            json_path, report.report("drafts", settings, results, gate=passed, threads=engine.threads)
        )
    if plot_path is not None:
        from .plots import plot_bars

        bars = {r.what: {"": r.gain.median} for r in rows}
        plot_bars(plot_path, bars, title=title, label="times sooner", line_at=1.0)


def _measure(
    alone: Engine,
    drafting: Engine,
    writer: Writer,
    tokens: int,
    generated: int,
    repeats: int,
    steps: Steps,
) -> list[Decode]:
    """The first turn is a warm-up; engines swap turns."""
    seen: dict[str, dict[str, list[float]]] = {
        what: {"alone": [], "drafting": []} for what in ("ordinary", "composed")
    }
    for repeat in range(repeats + 1):
        steps.show("decode")
        document, question = list(writer.document(tokens)), list(writer.document(QUESTION))
        asks = {
            "ordinary": Ask([*document, *question], max_tokens=generated, logprobs=None),
            "composed": Ask([*document, alone.separator, *question], max_tokens=generated, logprobs=None),
        }
        engines = (alone, drafting) if repeat % 2 else (drafting, alone)
        answers: set[tuple[int, ...]] = set()
        for what, ask in asks.items():
            for engine in engines:
                engine.ask(ask)  # records, and vLLM's prefix cache
                answer = engine.ask(ask)
                answers.add(answer.tokens)
                if repeat:
                    seen[what][engine.name].append(_a_token(answer))
        if len(answers) > 1:
            raise gate.GateFailed(
                f"a prompt has {len(answers)} different answers: expected equal answers, composed and drafted"
            )
        steps.done()
    return [
        Decode(what, (one := Spread.of(of["alone"])), (two := Spread.of(of["drafting"])), one.over(two))
        for what, of in seen.items()
    ]


def _a_token(answer: Answer) -> float:
    """Tokens come several at once where drafts are right."""
    return (answer.token_s[-1] - answer.token_s[0]) / (len(answer.token_s) - 1)


def _numbers(gain: Spread) -> list[str]:
    return [f"{x:.3f}" for x in (gain.median, gain.min, gain.max)]
