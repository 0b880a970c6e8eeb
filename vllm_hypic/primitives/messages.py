"""Find the messages of a rendered chat in its tokens, whatever the template.

Templates write a *header* before each message: special tokens and a few words that name the role, often up
to the line's end.  The message's content follows the header, up to the next special token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

MAX_HEADER = 16
"""Most tokens between a special token and the end of a header's line."""
_LINE = re.compile(r"\s*[\w-]{0,32}\s*")
"""Pattern of a header's line."""
_NAMES = re.compile(r"\s*[\w.:-]{0,64}(?:\s+to=[\w.:-]{1,64})?(?:\s+json)?\s*")
"""Pattern of the text between two special tokens of a header: a role or a channel, perhaps a recipient."""
ANSWERING = ("assistant", "model", "chatbot")
ASKING = ("user", "human")
RESULTS = ("tool", "function", "functions", "ipython", "observation")
"""Names of roles in headers."""
_ROLES = frozenset({*ANSWERING, *ASKING, *RESULTS})
_OPEN = re.compile(r"(?:\A|[^a-z])(?:assistant|model|chatbot|ai)\W*\Z")
"""Pattern of a prompt's last words where the template writes the answer's header as ordinary text."""
_WORD = re.compile(r"(?<![=\w.-])[\w-]+")
"""Pattern of a word of a header; a recipient (``to=``) and a function's own name are no words."""
_RESULT = "<tool_response>"
"""Tag at the beginning of a tool's result, where a template writes the result as a message of the user."""


@dataclass(frozen=True)
class Message:
    """Tokens ``[start, stop)`` of a message's content, or of a prompt without special tokens."""

    start: int
    stop: int
    leads: bool
    """Whether the message begins the prompt and may be cached unchanged: a system message or a text."""
    answers: bool
    """The model wrote the message, or must begin its answer with it."""
    asks: bool = False
    """The user wrote the message, and it is no tool's result."""


def messages_of(
    ids: Sequence[int], read: Callable[[int, int], str], special: Mapping[int, str]
) -> list[Message]:
    """Return the messages of ``ids``, in order, without empty messages.

    ``read(start, stop)`` returns the text of these tokens; the function reads only headers and the first
    words of contents.  ``special``: names of special tokens by id; a name may be the role (``<|user|>``).
    """
    marks = [i for i, token in enumerate(ids) if token in special]
    if not marks:
        return [Message(0, len(ids), True, False)] if ids else []
    found = [Message(0, marks[0], True, False)] if marks[0] else []
    after = 0
    for mark in marks:
        if mark < after:
            continue  # inside the header before
        start = _header_stop(ids, read, special, mark)
        after = start
        behind = bisect_left(marks, start)
        stop = marks[behind] if behind < len(marks) else len(ids)
        if stop > start:
            role = _role(ids, read, special, mark, start)
            begins = read(start, min(stop, start + MAX_HEADER)).lstrip()
            asks = role in ASKING and not begins.startswith(_RESULT)
            found.append(Message(start, stop, not found and role is None, role in ANSWERING, asks))
    if len(found) > 1:
        last = found[-1]
        is_short = last.stop == len(ids) and last.stop - last.start <= MAX_HEADER
        if is_short and not last.asks and _OPEN.search(read(last.start, last.stop).lower()):
            found[-1] = replace(last, answers=True)
    return found


def newest_of(messages: Sequence[Message]) -> int:
    """Return the index of the message that begins the newest part of a prompt.

    This is the last message of a user.  Where headers name no user, this is the last message that the model
    did not write, and otherwise the last message.
    """
    last = len(messages) - 1
    for wanted in (lambda m: m.asks, lambda m: not m.answers):
        found = next((i for i in range(last, -1, -1) if wanted(messages[i])), None)
        if found is not None:
            return found
    return max(0, last)


def _role(
    ids: Sequence[int], read: Callable[[int, int], str], special: Mapping[int, str], start: int, stop: int
) -> str | None:
    """Return the first word that names a role in the header ``[start, stop)``."""
    text = ""
    for i in range(start, stop):
        # The parts of a special token's name are words: <|START_OF_TURN_TOKEN|><|USER_TOKEN|>.
        name = special.get(ids[i])
        text += read(i, i + 1).lower() if name is None else f" {re.sub('[^a-z]+', ' ', name.lower())} "
    words = (word for found in _WORD.findall(text) for word in (found, found.partition("_")[0]))
    return next((word for word in words if word in _ROLES), None)


def _header_stop(
    ids: Sequence[int], read: Callable[[int, int], str], special: Mapping[int, str], mark: int
) -> int:
    """Return the index of the token behind the header that begins with the special token ``mark``."""
    stop = at = mark + 1
    while at < len(ids) and at - stop < MAX_HEADER:
        if ids[at] in special:
            if not _NAMES.fullmatch(read(stop, at)):
                return stop
            stop = at + 1
        elif "\n" in read(at, at + 1):
            if not _LINE.fullmatch(read(stop, at + 1)):
                return stop
            stop = at + 1
            if stop == len(ids) or ids[stop] not in special:
                return stop
        at += 1
    return stop
