"""A task: a question over segments, with its right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..harness.engines import Engine
from ..harness.prompts import Prompt
from ..primitives.builder import build_messages, build_prompt
from ..primitives.tokens import PrimitiveTexts

TEXTS = PrimitiveTexts()


@dataclass(frozen=True)
class Task:
    """Texts; none of them holds a primitive's text."""

    family: str
    """Kind of task: results are told by family."""
    system: str
    """The leading segment: instructions that stand before the segments, never empty."""
    segments: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    """Any of them is right."""
    answer_tokens: int
    """Most tokens that an answer may take."""
    continuation: str = ""
    """Where it is not empty, nothing is asked: this is what follows, and how likely its first
    ``answer_tokens`` tokens are is what counts."""
    opening: str = ""
    """First words of the answer, which are given: small chat models keep to the question then."""
    after: tuple[tuple[str, str], ...] = ()
    """Messages behind the question, role and text: an agent's calls, and their results."""


@dataclass(frozen=True)
class Example:
    """A task as one model's token ids."""

    task: Task
    prompt: Prompt
    continuation: tuple[int, ...] = ()
    """Tokens of the task's continuation; empty where a question is asked."""


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become a prompt."""

    text: str | None = None
    """``None``: the template that comes with the model."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Given to the template, like ``{"enable_thinking": False}``."""


def encode(
    engine: Engine, tasks: Sequence[Task], *, chat: bool, template: ChatTemplate = ChatTemplate()
) -> list[Example]:
    """``tasks`` for the model of a hypic engine; ``chat``: through the chat template.

    Every segment is tokenised alone, so that all methods, plain prompts among them, see the same tokens.
    Raises ``ValueError`` for a task that has other segments once it is tokenised.
    """
    if not chat and any(task.after for task in tasks):
        raise ValueError("a task has tool calls, which need a chat: use a chat template, not --no-chat")
    texts = [
        [
            *build_messages(documents=t.segments, question=t.question, system=t.system),
            *({"role": role, "content": text} for role, text in t.after),
        ]
        if chat
        else build_prompt(system=t.system, segments=t.segments, query=t.question)
        for t in tasks
    ]
    found = engine.call(_token_ids, texts, template)
    given: list[tuple[list[int], list[int]]] = [([], []) for _ in tasks]
    if any(task.opening or task.continuation for task in tasks):
        given = engine.call(_given_ids, [(task.opening, task.continuation) for task in tasks])
    return [
        Example(task, _split(task, [*ids, *opening], engine.separator), tuple(after[: task.answer_tokens]))
        for task, ids, (opening, after) in zip(tasks, found, given, strict=True)
    ]


def _token_ids(
    llm: object, texts: Sequence[str | list[dict[str, str]]], template: ChatTemplate
) -> list[list[int]]:
    """Render a chat; runs in the engine's process."""
    tokenizer = llm.get_tokenizer()  # type: ignore[attr-defined]

    def of_messages(messages: list[dict[str, str]]) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages,
                chat_template=template.text,
                add_generation_prompt=True,
                return_dict=False,
                **template.options,
            )
        )

    return [list(tokenizer.encode(t)) if isinstance(t, str) else of_messages(t) for t in texts]


def _given_ids(llm: object, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Openings and continuations: nothing is put before them; runs in the engine's process."""
    tokenizer = llm.get_tokenizer()  # type: ignore[attr-defined]

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False)) if text else []

    return [(ids(opening), ids(after)) for opening, after in texts]


def _split(task: Task, ids: Sequence[int], separator: int) -> Prompt:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    if len(parts) != len(task.segments) + 2 or not all(parts):
        raise ValueError(
            f"a task of the family {task.family!r} has {len(task.segments)} segments, but its prompt "
            f"has {len(parts) - 2}, of which {sum(not p for p in parts)} are empty"
        )
    head, *documents, question = map(tuple, parts)
    return Prompt(head, tuple(documents), question)
