"""Find the messages of a rendered chat in its tokens, whatever the template.

Templates write a *header* before each message: special tokens and a few words that name the role, often up
to the line's end.  The message's content follows the header, up to the next special token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

MAX_HEADER = 16
"""Most tokens between a special token and the end of a header's line."""
_ROLE = re.compile(r"\s*[\w-]{0,32}\s*")
"""Pattern of a header's line."""
ANSWERING = ("assistant", "model")
ASKING = ("user", "human")
RESULTS = ("tool", "function", "ipython")
"""Names of roles in headers."""
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
    ids: Sequence[int], read: Callable[[int, int], str], special: Collection[int]
) -> list[Message]:
    """Return the messages of ``ids``, in order, without empty messages.

    ``read(start, stop)`` returns the text of these tokens; the function reads only headers and the first
    words of contents.
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
            header = read(mark, start)
            answers, asks, results = (
                any(role in header for role in roles) for roles in (ANSWERING, ASKING, RESULTS)
            )
            leads = not (found or answers or asks or results)
            asks = asks and not read(start, min(stop, start + MAX_HEADER)).lstrip().startswith(_RESULT)
            found.append(Message(start, stop, leads, answers, asks))
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


def _header_stop(
    ids: Sequence[int], read: Callable[[int, int], str], special: Collection[int], mark: int
) -> int:
    """Return the index of the token behind the header that begins with the special token ``mark``."""
    stop = at = mark + 1
    while at < len(ids) and at - stop < MAX_HEADER:
        if ids[at] in special:
            stop = at + 1
        elif "\n" in read(at, at + 1):
            if not _ROLE.fullmatch(read(stop, at + 1)):
                return stop
            stop = at + 1
            if stop == len(ids) or ids[stop] not in special:
                return stop
        at += 1
    return stop
