"""Tasks of agents: tool calls and results follow a question, and the answer stands in one of four places."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks import natural
from vllm_hypic.eval.tasks.lexicon import CITIES

PLACES = {
    "call-new": "a fact in the newest result of a tool",
    "call-old": "a fact in an older result of a tool",
    "call-doc": "a fact in a document, behind which tools were called",
    "call-arg": "a fact in the arguments of a call",
}
"""Families, by the place of the answer."""
RESULT_TOKENS = 140
"""Approximate tokens in a tool's result."""


def task(place: str, number: int, documents: int, tokens: int) -> Task:
    """Return a question about an office; documents, results and arguments hold facts of several offices."""
    rng = random.Random(f"{place} {number}")
    kind = rng.choice(natural.KINDS)
    cities = rng.sample(CITIES, documents + 3)
    codes = natural.numbers(rng, documents + 3, digits=4)
    statements = natural.office_facts(kind, cities, codes)
    told = natural.documents_with(rng, statements[:documents], tokens)
    older, newest = natural.documents_with(rng, statements[documents : documents + 2], RESULT_TOKENS)
    asked = {
        "call-new": documents + 1,
        "call-old": documents,
        "call-doc": rng.randrange(documents),
        "call-arg": documents + 2,
    }[place]
    made = natural.question_task(
        place,
        told,
        f"What is the {kind} of the {cities[asked]} office?",
        f"The {kind} of the {cities[asked]} office is",
        codes[asked],
    )
    calls = (
        ("assistant", '{"name": "search", "arguments": {"text": "offices"}}'),
        ("tool", older),
        ("assistant", f'{{"name": "search", "arguments": {{"note": "{statements[-1]}"}}}}'),
        ("tool", newest),
    )
    return replace(made, after=calls)


TASKS = {place: partial(task, place) for place in PLACES}
