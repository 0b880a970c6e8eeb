"""``criteria``: other criteria than the query's words for what is recomputed, emulated at equal budgets on
the prompts of ``python -m benchmarks.answers``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from vllm_hypic.eval import estimates
from vllm_hypic.eval.estimates import nll_increase
from vllm_hypic.eval.scores import holds, words
from vllm_hypic.eval.task import TEXTS, Prompt, Task
from vllm_hypic.eval.tasks.families import CONTINUATIONS, FAMILIES, QUESTIONS, Source
from vllm_hypic.harness.report import console
from vllm_hypic.primitives.builder import build_messages
from vllm_hypic.primitives.context import context_text, context_tokens
from vllm_hypic.primitives.islands import choose_islands
from vllm_hypic.primitives.token_texts import TokenTexts
from vllm_hypic.primitives.windows import Words
from vllm_hypic.tune.dense import Dense

from .answers.results import PERCENT, Score
from .emulated import Composed, columns_of
from .lib import report
from .lib.report import check_outputs, output_options
from .lib.stats import share

FULL = "full recompute"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One criterion at one budget, as the reports of the evaluation have it."""

    method: str
    computed_tokens: float
    prompt_tokens: float
    kl_mean: estimates.Estimate


@dataclass(frozen=True, kw_only=True)
class QuestionCell(Cell):
    contains: Score


@dataclass(frozen=True, kw_only=True)
class TextCell(Cell):
    nll: estimates.Estimate
    increase: estimates.Estimate
    """Percent above full recompute's."""


@dataclass(frozen=True)
class Answered:
    computed: int
    kl: float
    score: float
    """Per cent right, of a text nats a token."""


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
@click.option(
    "--task", "family", type=click.Choice([*QUESTIONS, *CONTINUATIONS]), default="facts", show_default=True
)
@click.option("--prompts", type=click.IntRange(2, 10000), default=60, show_default=True)
@click.option("--budgets", default="15", show_default=True, help="Per cent of reused tokens.")
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
            methods: dict[str, Sequence[int] | None] = {FULL: None, "emulated: seams": sorted(seams)}
            for budget in map(int, budgets.split(",")):
                for name, choose in choices.items():
                    again = choose(composed, inside, served * budget // 100)
                    methods[f"emulated: {name}-{budget}"] = sorted(seams.union(again))
            full = torch.empty(0)
            for method, rows in methods.items():
                first, score = _ask(tokenizer, composed, task, rows)
                full = first.log_softmax(-1) if rows is None else full
                kl = float((full.exp() * (full - first.log_softmax(-1))).sum())
                computed = len(prompt) if rows is None else len(rows) + len(prompt.question)
                found.setdefault(method, []).append(Answered(computed, kl, score))
            steps.done()
    cell = _text_cell if family in CONTINUATIONS else _question_cell
    mean = sum(lengths) / len(lengths)
    cells = [cell(method, answers, found[FULL], mean) for method, answers in found.items()]
    columns = ("method", "computed", "right or nats", "to full recompute, points or %", "KL of first token")
    console().print(report.table(f"{family}, {prompts} prompts, emulated", columns, map(_row, cells)))
    if json_path is not None:
        settings = {"model": Path(model).name, "prompts": prompts, "seam": seam, "emulated": True}
        results: dict[str, Any] = {"families": [], "texts": []}
        kind = "texts" if family in CONTINUATIONS else "families"
        results[kind] = [{"family": family, "prompts": prompts, "cells": cells}]
        report.write_json(json_path, report.report("criteria", settings, results, threads=1))


def _ask(
    tokenizer: Any, composed: Composed, task: Task, rows: Sequence[int] | None
) -> tuple[torch.Tensor, float]:
    """Scores of the first token, and what counts."""
    if task.continuation:
        ids = tokenizer.encode(task.continuation, add_special_tokens=False)[: task.answer_tokens]
        return composed.likelihood(rows, ids)
    first, answer = composed.answer(rows, task.answer_tokens, tokenizer.eos_token_id)
    text = words(tokenizer.decode(answer, skip_special_tokens=True))
    right = any(holds(text, words(a)) for a in task.answers)
    return first, PERCENT * right


def _prompt(tokenizer: Any, task: Task) -> Prompt:
    """The token ids of the evaluation: every segment is tokenised alone."""
    messages = build_messages(documents=task.segments, question=task.question, system=task.system)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, *documents, question = (
        tuple(tokenizer.encode(part, add_special_tokens=False)) for part in text.split(TEXTS.sep)
    )
    opening = tokenizer.encode(task.opening, add_special_tokens=False)
    return Prompt(head, tuple(documents), (*question, *opening))


def _question_cell(
    method: str, answers: Sequence[Answered], full: Sequence[Answered], prompt: float
) -> QuestionCell:
    own, base = ([a.score for a in found] for found in (answers, full))
    right = share([score > 0 for score in own]).times(PERCENT)
    contains = Score(right, estimates.difference(own, base))
    return QuestionCell(contains=contains, **_cell(method, answers, prompt))


def _text_cell(method: str, answers: Sequence[Answered], full: Sequence[Answered], prompt: float) -> TextCell:
    own, base = ([a.score for a in found] for found in (answers, full))
    return TextCell(
        nll=estimates.mean(own), increase=nll_increase(own, base), **_cell(method, answers, prompt)
    )


def _cell(method: str, answers: Sequence[Answered], prompt: float) -> dict[str, Any]:
    return {
        "method": method,
        "computed_tokens": sum(a.computed for a in answers) / len(answers),
        "prompt_tokens": prompt,
        "kl_mean": estimates.mean([a.kl for a in answers]),
    }


def _row(cell: QuestionCell | TextCell) -> tuple[str, ...]:
    if isinstance(cell, QuestionCell):
        score, difference = f"{cell.contains.mean.value:.1f}", cell.contains.difference
    else:
        score, difference = f"{cell.nll.value:.3f}", cell.increase
    return (
        cell.method,
        f"{100 * cell.computed_tokens / cell.prompt_tokens:.1f} %",
        score,
        f"{difference.value:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]",
        f"{cell.kl_mean.value:.4f}",
    )
