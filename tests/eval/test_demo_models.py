"""What demo models are asked is answered by what they are given to read: by a reader that only reads."""

import re

import pytest

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.families import FAMILIES, Source
from vllm_hypic.harness.generators import EXAMPLE, Generator, find_generator

FACT = re.compile(r"(?P<subject>ent\d+|\|) (?P<relation>rel\d+) (?P<value>(?:ent|val)\d+(?: val\d+)?) \.")
MOVE = re.compile(r"@ (?P<who>ent\d+) (?P<place>ent\d+) \.")


def read(task: Task) -> tuple[dict[tuple[str, str], list[str]], dict[str, str]]:
    """Values of every (entity, relation) in the order in which they are told, and where movers ended."""
    told: dict[tuple[str, str], list[str]] = {}
    places: dict[str, str] = {}
    for segment in task.segments:
        header = segment.split()[1]
        for fact in FACT.finditer(segment):
            subject = header if fact["subject"] == "|" else fact["subject"]
            told.setdefault((subject, fact["relation"]), []).append(fact["value"])
        places |= {move["who"]: move["place"] for move in MOVE.finditer(segment)}
    return told, places


def answered(task: Task) -> str:
    told, places = read(task)
    words = task.question.split()[1:-1]
    if words[0] == "@":
        place = places[words[1]]
        return " ".join([place, *(told[place, relation][-1] for relation in words[2:])])
    entity, *relations = words
    values = []
    for relation in relations:
        values.append(told[entity, relation][-1])
        entity = values[-1]
    return " ".join(values)


@pytest.mark.parametrize("kind", ["one", "head", "two", "latest", "both"])
def test_answers_are_in_the_documents(generator: Generator, kind: str) -> None:
    if not FAMILIES[kind].suits(generator):
        assert kind == "both" and kind not in generator.LEARNED
        return
    for task in FAMILIES[kind].make(Source(generator), 0, 40, 6, 100):
        assert task.answers == (answered(task),)


def test_the_last_move_is_not_the_only_one() -> None:
    """Else the kind asks nothing of the order of documents."""
    generator = find_generator(EXAMPLE.parent / "hybrid-notes" / "model")
    assert generator is not None
    for task in FAMILIES["latest"].make(Source(generator), 0, 40, 6, 100):
        who = task.question.split()[2]
        assert sum(move["who"] == who for s in task.segments for move in MOVE.finditer(s)) >= 2
