"""Build prompts from segments, so that callers need not write separators by hand.

Each builder returns ``system SEP segment SEP segment SEP query``.  The system part is the leading
segment.  A prompt without a system part starts with a separator, so that every segment is reusable
in any order.  A prompt without a query only warms the cache.

The builders put nothing around the separators: each segment is tokenised exactly as given.  Callers
must pass the same text each time for a lookup to find its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tokens import PrimitiveIds, PrimitiveTexts

DEFAULT_TEXTS = PrimitiveTexts()


def build_prompt(
    *,
    segments: Iterable[str],
    query: str = "",
    system: str | None = None,
    texts: PrimitiveTexts = DEFAULT_TEXTS,
) -> str:
    """Return a prompt string for completions or ``LLM.generate``.

    ``texts``: text forms of the primitives; pass the tokenizer's ``prompt_texts`` where texts are literal.
    Raises ``TypeError`` for arguments that are not text.  Raises ``ValueError`` for an empty segment, an
    argument that contains a primitive's text, and literal ``texts``.
    """
    if texts.literal:
        raise ValueError(
            "texts.literal=True: expected the tokenizer's prompt_texts, as literal texts mark no segments"
        )
    parts = _checked_texts("segments", segments, texts)
    lead = "" if system is None else _checked_text("system", system, texts, texts.sep)
    return texts.sep.join([lead, *parts, _checked_text("query", query, texts)])


def build_messages(
    *,
    documents: Iterable[str],
    question: str = "",
    system: str | None = None,
    texts: PrimitiveTexts = DEFAULT_TEXTS,
) -> list[dict[str, str]]:
    """Return messages for chat completions or ``LLM.chat``, with documents and question in one user message.

    The chat template's text before the documents, with the system message, is the leading segment.  The
    template's text after the question belongs to the query.  Raises as :func:`build_prompt` does.
    """
    content = build_prompt(
        segments=_checked_texts("documents", documents, texts),
        query=_checked_text("question", question, texts),
        texts=texts,
    )
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": _checked_text("system", system, texts)})
    return messages


def build_prompt_ids(
    *,
    segments: Iterable[Sequence[int]],
    ids: PrimitiveIds,
    query: Sequence[int] = (),
    system: Sequence[int] = (),
) -> list[int]:
    """Return the token ids of a prompt; ``ids`` is ``primitive_ids(tokenizer)``.

    The caller must put a beginning-of-sequence token first in ``system`` where the model needs it.
    Raises ``TypeError`` and ``ValueError`` as :func:`build_prompt` does.
    """
    if isinstance(segments, (str, bytes)):
        raise TypeError(f"segments: expected a list of token-id lists, got {type(segments).__name__}")
    prompt = _checked_ids("system", system, ids)
    for i, segment in enumerate(segments):
        part = _checked_ids(f"segments[{i}]", segment, ids)
        if not part:
            raise ValueError(f"segments[{i}] is empty: leave it out")
        prompt += [ids.sep, *part]
    return [*prompt, ids.sep, *_checked_ids("query", query, ids)]


def _checked_text(name: str, text: str, texts: PrimitiveTexts, behind: str = "") -> str:
    """Return ``text``, which the text ``behind`` follows, if no primitive begins in ``text``."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected text (str), got {type(text).__name__}")
    if (found := texts.beginning_in(text, behind)) is not None:
        raise ValueError(
            f"{name} contains {found[1]!r}, the text of {found[0]}, or ends with its beginning: "
            "remove it from the text, or set another text in token_texts"
        )
    return text


def _checked_texts(name: str, values: Iterable[str], texts: PrimitiveTexts) -> list[str]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of texts, got {type(values).__name__}")
    checked = [_checked_text(f"{name}[{i}]", value, texts, texts.sep) for i, value in enumerate(values)]
    for i, value in enumerate(checked):
        if not value:
            raise ValueError(f"{name}[{i}] is empty: leave it out")
    return checked


def _checked_ids(name: str, values: Sequence[int], ids: PrimitiveIds) -> list[int]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a list of token ids, got {type(values).__name__}")
    # The engine accepts plain integers only, so ids from numpy arrays and tensors are converted.
    checked = [_token_id(name, i, value) for i, value in enumerate(values)]
    for i, value in enumerate(checked):
        if (marker := ids.marker(value)) is not None:
            raise ValueError(f"{name}[{i}]={value} is the id of {marker.value}: remove it")
    return checked


def _token_id(name: str, i: int, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}[{i}]={value!r}: expected a token id, an integer")
    token = value.__index__()
    if token < 0:
        raise ValueError(f"{name}[{i}]={token}: expected a token id, an integer >= 0")
    return token
