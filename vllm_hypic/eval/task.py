"""A task: a question over segments, with its right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..harness.engines import Engine
from ..primitives.builder import build_messages, build_prompt
from ..primitives.tokens import PrimitiveTexts

TEXTS = PrimitiveTexts()
Document = tuple[int, ...]
"""Token ids of a segment."""


@dataclass(frozen=True)
class Task:
    """A task as texts, which hold no primitive's text."""

    family: str
    """Kind of task, by which results are reported."""
    system: str
    """Leading segment: instructions before the segments, never empty."""
    segments: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    """Right answers, any of which counts."""
    answer_tokens: int
    """Limit on the tokens of an answer."""
    continuation: str = ""
    """Text that follows the prompt; if not empty, the task asks no question, and the likelihood of the text's
    first ``answer_tokens`` tokens is measured."""
    opening: str = ""
    """First words of the answer, which are given so that small chat models keep to the question."""
    after: tuple[tuple[str, str], ...] = ()
    """Messages behind the question, as role and text: an agent's calls and their results."""


@dataclass(frozen=True)
class Prompt:
    """A leading segment, documents and a question, as token ids."""

    head: Document
    documents: tuple[Document, ...]
    question: Document

    def plain(self) -> list[int]:
        """Return the token ids for stock vLLM, with all parts end to end."""
        return [*self.head, *(t for d in self.documents for t in d), *self.question]

    def marked(self, separator: int) -> list[int]:
        """Return the token ids with a separator after the leading segment and after every document."""
        tokens = [*self.head, separator]
        for document in self.documents:
            tokens += [*document, separator]
        return [*tokens, *self.question]

    def reordered(self, order: Sequence[int], question: Document) -> Prompt:
        """Return a prompt with the same documents in another order, and another question."""
        return replace(self, documents=tuple(self.documents[i] for i in order), question=question)

    def __len__(self) -> int:
        """Return the number of tokens without separators."""
        return len(self.head) + sum(map(len, self.documents)) + len(self.question)


@dataclass(frozen=True)
class Example:
    """A task as token ids of a model."""

    task: Task
    prompt: Prompt
    continuation: tuple[int, ...] = ()
    """Tokens of the task's continuation; empty for a question."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, which turns messages into a prompt."""

    text: str | None = None
    """Text of the template; ``None`` for the model's own template."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the template, like ``{"enable_thinking": False}``."""


def encode(
    engine: Engine, tasks: Sequence[Task], *, chat: bool, template: ChatTemplate = ChatTemplate()
) -> list[Example]:
    """Return the ``tasks`` as token ids for a hypic engine; ``chat`` applies the chat template.

    Every segment is tokenised alone, so that all methods, plain prompts included, see the same tokens.
    Raises ``ValueError`` for a task whose segments change in tokenisation.
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
    """Return the token ids of texts and of chats; runs in the engine's process."""
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
    """Return token ids of openings and continuations without special tokens; runs in the engine's process."""
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
