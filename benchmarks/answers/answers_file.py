"""Writes every single answer to a file, as JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from vllm_hypic.eval.runner import MethodAnswer
from vllm_hypic.eval.scores import Likelihood, Scores
from vllm_hypic.eval.task import Task

from .study import Keep


@contextmanager
def writing_answers(path: Path | None) -> Iterator[Keep]:
    """Yield a function that writes an answer; the file appears when all answers are written.

    With ``path`` ``None`` the function writes nothing."""
    if path is None:
        yield lambda task, method, outcome, scores: None
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as lines:

        def keep(task: Task, method: str, outcome: MethodAnswer, scores: Scores | Likelihood) -> None:
            line = {
                "family": task.family,
                "method": method,
                "question": task.question,
                "answers": task.answers,
                "text": outcome.text,
                "tokens": outcome.tokens,
                "computed": outcome.computed,
                **asdict(scores),
            }
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")

        yield keep
    partial.replace(path)
