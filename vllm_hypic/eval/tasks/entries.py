"""Extractive questions over prose: entries on similar buildings, and questions in other words."""

from __future__ import annotations

import random

from ..task import Task
from . import natural
from .lexicon import CITIES, SURNAMES

FAMILY = "entries"
BUILDINGS = ("Bridge", "Library", "Museum", "Theatre", "Tower")
MATERIALS = (
    *("red brick", "grey granite", "white marble", "yellow sandstone", "dark oak", "cast iron", "blue slate"),
    *("polished steel", "green copper", "pale limestone", "black basalt", "rough concrete"),
)
ASIDES = (
    "Repairs were needed after a storm damaged the roof.",
    "A small garden behind the building is open in summer.",
    "Guided tours start every morning at the main entrance.",
    "School classes visit it throughout the year.",
    "A photograph of the first visitors hangs near the door.",
    "It closes for two weeks each winter.",
    "Concerts take place there on warm evenings.",
    "The clock above the gate has not been changed since.",
)
"""Sentences that no question is about."""
FACT_WORDS = 36
"""Words in an entry's facts."""
ASIDE_WORDS = 8


def task(number: int, documents: int, tokens: int) -> Task:
    rng = random.Random(f"{FAMILY} {number}")
    building = rng.choice(BUILDINGS)
    names = [f"{name} {building}" for name in rng.sample(SURNAMES, documents)]
    facts = list(
        zip(
            rng.sample(CITIES, documents),
            natural.people(rng, documents),
            map(str, rng.sample(range(1850, 1990), documents)),
            (rng.choice(MATERIALS) for _ in names),
            strict=True,
        )
    )
    asides = min(len(ASIDES), max(0, natural.words_of(tokens) - FACT_WORDS) // ASIDE_WORDS)
    entries = []
    for name, (city, architect, year, material) in zip(names, facts, strict=True):
        sentences = [
            f"The {name} was designed by {architect}, who won a competition.",
            f"It was opened to the public in {year}.",
            f"The walls of the building are made of {material}.",
            *rng.sample(ASIDES, asides),
        ]
        rng.shuffle(sentences)
        entries.append(" ".join([f"The {name} is in {city}.", *sentences]))
    asked, what = rng.randrange(documents), rng.randrange(4)
    question, opening = (
        ("In which city does the {} stand?", "The {} stands in"),
        ("Who was the architect of the {}?", "The architect of the {} was"),
        ("When did the {} open?", "The {} opened in"),
        ("What are the walls of the {} made of?", "The walls of the {} are made of"),
    )[what]
    name = names[asked]
    return natural.task(FAMILY, entries, question.format(name), opening.format(name), facts[asked][what])
