"""``criteria``: other criteria than the query's words for what is recomputed, emulated at equal budgets on
the prompts of ``python -m vllm_hypic.eval``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from vllm_hypic.eval import estimates
from vllm_hypic.eval.results import PERCENT, Score
from vllm_hypic.eval.scores import holds, words
from vllm_hypic.eval.task import TEXTS, Task
from vllm_hypic.eval.tasks.families import FAMILIES, QUESTIONS, Source
from vllm_hypic.harness import report
from vllm_hypic.harness.prompts import Prompt
from vllm_hypic.harness.report import check_outputs, console, output_options
from vllm_hypic.primitives.builder import build_messages
from vllm_hypic.primitives.context import context_text, context_tokens
from vllm_hypic.primitives.islands import choose_islands
from vllm_hypic.primitives.token_texts import TokenTexts
from vllm_hypic.primitives.windows import Words
from vllm_hypic.tune.dense import Dense

from .emulated import Composed, columns_of

FULL = "full recompute"


@dataclass(frozen=True)
class Cell:
    """One criterion at one budget, as the reports of the evaluation have it."""

    method: str
    computed_tokens: float
    prompt_tokens: float
    kl_mean: estimates.Estimate
    contains: Score


@dataclass(frozen=True)
class Answered:
    computed: int
    kl: float
    right: bool


Choice = Callable[[Composed, list[range], int], Iterable[int]]
"""(prompt, positions that records serve, budget in tokens) -> positions to compute again."""


def _most(scores: torch.Tensor, inside: list[range], budget: int) -> list[int]:
    """Token by token, as ProphetKV and CacheBlend choose."""
    at = torch.tensor([p for part in inside for p in part])
    return at[scores[at].topk(min(budget, len(at))).indices].tolist()


def _of_query(made: Words) -> Choice:
    def choose(prompt: Composed, inside: list[range], budget: int) -> list[int]:
        ids = prompt.prompt.plain()
        interiors = [tuple(ids[part.start : part.stop]) for part in inside]
        chosen = choose_islands(interiors, prompt.prompt.question, budget, made)
        return [
            part.start + i
            for part, ranges in zip(inside, chosen, strict=True)
            for first, stop in ranges
            for i in range(first, stop)
        ]

    return choose


def _at_random(prompt: Composed, inside: list[range], budget: int) -> list[int]:
    return random.Random(prompt.end).sample([p for part in inside for p in part], budget)


@click.command(help=__doc__)
@click.option("--model", required=True, help="A dense model with a chat template: a folder.")
@click.option("--task", "family", type=click.Choice(QUESTIONS), default="facts", show_default=True)
@click.option("--prompts", type=click.IntRange(2, 10000), default=60, show_default=True)
@click.option("--budgets", default="15", show_default=True, help="Per cent of what records serve.")
@click.option("--seam", type=click.IntRange(0, 64), default=8, show_default=True)
@output_options
def criteria(
    model: str,
    family: str,
    prompts: int,
    budgets: str,
    seam: int,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    check_outputs(json_path, plot_path)
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer, dense = AutoTokenizer.from_pretrained(model), Dense(model)
    text = context_tokens(tokenizer, context_text(None))
    context = columns_of(dense, text)
    choices: dict[str, Choice] = {
        "query": _of_query(Words(TokenTexts(tokenizer).of)),
        "attention": lambda prompt, inside, budget: _most(prompt.draws, inside, budget),
        "deviation": lambda prompt, inside, budget: _most(prompt.deviation, inside, budget),
        "random": _at_random,
    }
    of = FAMILIES[family]
    tasks = of.make(Source(None), 0, prompts, of.documents, of.tokens)
    found: dict[str, list[Answered]] = {}
    lengths = []
    with report.progress(console(), prompts, "prompts") as steps:
        for task in tasks:
            prompt = _prompt(tokenizer, task)
            lengths.append(len(prompt))
            composed = Composed(dense, prompt, context)
            inside = [range(first + seam, max(first + seam, stop - seam)) for first, stop in composed.bounds]
            seams = set(range(len(prompt.head), composed.end)) - {p for part in inside for p in part}
            served = sum(map(len, inside))
            full = composed.answer(None, task.answer_tokens)
            methods: dict[str, Iterable[int] | None] = {FULL: None, f"hypic-{seam}/text": ()}
            for budget in map(int, budgets.split(",")):
                for name, choose in choices.items():
                    methods[f"hypic-{seam}/text/{name}-{budget}"] = choose(
                        composed, inside, served * budget // 100
                    )
            for method, rows in methods.items():
                again = None if rows is None else sorted(seams.union(rows))
                scores, ids = full if again is None else composed.answer(again, task.answer_tokens)
                p, q = full[0].log_softmax(-1), scores.log_softmax(-1)
                found.setdefault(method, []).append(
                    Answered(
                        len(prompt) if again is None else len(again) + len(prompt.question),
                        float((p.exp() * (p - q)).sum()),
                        any(holds(words(tokenizer.decode(ids)), words(a)) for a in task.answers),
                    )
                )
            steps.done()
    mean = sum(lengths) / len(lengths)
    cells = [_cell(method, answers, found[FULL], mean) for method, answers in found.items()]
    columns = ("method", "computed", "right", "to full recompute", "KL of first token")
    console().print(report.table(f"{family}, {prompts} prompts, emulated", columns, map(_row, cells)))
    if json_path is not None:
        settings = {"model": Path(model).name, "prompts": prompts, "seam": seam, "emulated": True}
        results = {"families": [{"family": family, "prompts": prompts, "cells": cells}], "texts": []}
        report.write_json(json_path, report.report("criteria", settings, results, threads=1))


def _prompt(tokenizer: Any, task: Task) -> Prompt:
    """The token ids of the evaluation: every segment is tokenised alone."""
    messages = build_messages(documents=task.segments, question=task.question, system=task.system)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, *documents, question = (
        tuple(tokenizer.encode(part, add_special_tokens=False)) for part in text.split(TEXTS.sep)
    )
    opening = tokenizer.encode(task.opening, add_special_tokens=False)
    return Prompt(head, tuple(documents), (*question, *opening))


def _cell(method: str, answers: Sequence[Answered], full: Sequence[Answered], prompt: float) -> Cell:
    right, reference = ([PERCENT * a.right for a in found] for found in (answers, full))
    return Cell(
        method if method == FULL else f"{method}, emulated",
        sum(a.computed for a in answers) / len(answers),
        prompt,
        estimates.mean([a.kl for a in answers]),
        Score(
            estimates.share([a.right for a in answers]).times(PERCENT), estimates.difference(right, reference)
        ),
    )


def _row(cell: Cell) -> tuple[str, ...]:
    right, difference = cell.contains.mean, cell.contains.difference
    return (
        cell.method,
        f"{100 * cell.computed_tokens / cell.prompt_tokens:.1f} %",
        f"{right.value:.1f}",
        f"{difference.value:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]",
        f"{cell.kl_mean.value:.4f}",
    )
