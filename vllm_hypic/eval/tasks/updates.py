"""The last of several updates: every document moves the same event, and the question asks for its place."""

from __future__ import annotations

import random

from ..task import Task
from . import natural

FAMILY = "updates"
EVENTS = ("board meeting", "budget meeting", "chess club", "choir rehearsal", "training course")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def task(number: int, documents: int, tokens: int) -> Task:
    rng = random.Random(f"{FAMILY} {number}")
    event = rng.choice(EVENTS)
    rooms = natural.numbers(rng, documents, digits=3)
    told = [
        f"On {DAYS[day % len(DAYS)]} the {event} was moved to room {room}." for day, room in enumerate(rooms)
    ]
    return natural.task(
        FAMILY,
        natural.documents_with(rng, told, tokens),
        f"The {event} was moved several times. To which room was it moved last?",
        f"The last time, the {event} was moved to room",
        rooms[-1],
    )
