"""The natural families: questions and continued texts, made of installed texts.

Questions ask for names and numbers in statements that are inserted into the texts.  A small chat model can
answer the questions: reuse can lose only answers that full recompute has right.  The answer's first words are
given, because a small model may otherwise stray from the question.  An answer is right if the generated text
contains the gold answer.  A continued text needs neither question nor label: its likelihood is measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..task import Task
from .installed import installed_texts
from .lexicon import CITIES, NAMES, SURNAMES, THINGS

SYSTEM = "You answer questions about the documents below."
WORDS_PER_TOKEN = 0.75
"""Approximate words of English in a token: documents are asked for in tokens and written in words."""
ANSWER_TOKENS = 10
"""Tokens for a number, a name or two words behind the opening: a longer answer could list all facts."""
MOST_DOCUMENTS = 40
"""Limit on the documents of a task, for which the lexicon has enough different places and people."""
KINDS = ("access code", "door code", "phone extension", "account number")
PRICES = 2
"""Prices in a document."""
PRICE_TOKENS = 12
HOPS_TOKENS = 20
"""Tokens of an answer of two hops, enough for the office and a sentence with the fact."""
EVENTS = ("board meeting", "budget meeting", "chess club", "choir rehearsal", "training course")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
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
TEXT_TOKENS = 96
"""Tokens of a continuation whose likelihood is measured."""


def people(rng: random.Random, count: int) -> list[str]:
    """Return ``count`` names, which share neither first names nor surnames."""
    names = zip(rng.sample(NAMES, count), rng.sample(SURNAMES, count), strict=True)
    return [f"{first} {last}" for first, last in names]


def numbers(rng: random.Random, count: int, *, digits: int) -> list[str]:
    """Return ``count`` distinct numbers of ``digits`` digits, as texts."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def documents_with(rng: random.Random, statements: Sequence[str], tokens: int) -> list[str]:
    """Return a document of about ``tokens`` tokens for each statement, placed anywhere but at the start."""
    passages = installed_texts().passages(rng, len(statements), max(1, words_of(tokens)))
    for passage, statement in zip(passages, statements, strict=True):
        passage.insert(rng.randrange(1, len(passage) + 1), statement)
    return [" ".join(passage) for passage in passages]


def office_facts(kind: str, cities: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Return statements that differ only in the office and its number."""
    return [f"The {kind} of the {city} office is {code}." for city, code in zip(cities, codes, strict=True)]


def segments_of(documents: Sequence[str]) -> tuple[str, ...]:
    """Return the documents, each with an empty line at its end to give it the same tokens at any place."""
    return tuple(f"{document}\n\n" for document in documents)


def words_of(tokens: int) -> int:
    return int(tokens * WORDS_PER_TOKEN)


def question_task(
    family: str,
    documents: Sequence[str],
    question: str,
    opening: str,
    answer: str,
    *,
    tokens: int = ANSWER_TOKENS,
) -> Task:
    """Return a question of a natural family.

    Raises ``ValueError`` for fewer than 2 documents, or for more than the lexicon serves.
    """
    if not 2 <= len(documents) <= MOST_DOCUMENTS:
        raise ValueError(f"{len(documents)} documents: expected 2 to {MOST_DOCUMENTS}")
    return Task(
        family=family,
        system=SYSTEM,
        segments=segments_of(documents),
        question=question,
        answers=(answer,),
        answer_tokens=tokens,
        opening=opening,
    )


def facts(number: int, documents: int, tokens: int) -> Task:
    """Return a task with a similar statement in every document, and a question about one statement."""
    rng = random.Random(f"facts {number}")
    kind = rng.choice(KINDS)
    cities = rng.sample(CITIES, documents)
    codes = numbers(rng, documents, digits=4)
    asked = rng.randrange(documents)
    return question_task(
        "facts",
        documents_with(rng, office_facts(kind, cities, codes), tokens),
        f"What is the {kind} of the {cities[asked]} office?",
        f"The {kind} of the {cities[asked]} office is",
        codes[asked],
    )


def prices(number: int, documents: int, tokens: int) -> Task:
    """Return a task with several prices in every document, and a question for a price."""
    rng = random.Random(f"prices {number}")
    things = rng.sample(THINGS, documents * PRICES)
    amounts = numbers(rng, len(things), digits=3)
    told = [
        f"The price of the {thing} is {amount} dollars."
        for thing, amount in zip(things, amounts, strict=True)
    ]
    lists = [
        "\n".join([f"Prices of the shop in {city}:", *told[i * PRICES : (i + 1) * PRICES]])
        for i, city in enumerate(rng.sample(CITIES, documents))
    ]
    asked = rng.randrange(len(things))
    return question_task(
        "prices",
        documents_with(rng, [f"\n{one}\n" for one in lists], tokens - (PRICES + 1) * PRICE_TOKENS),
        f"What is the price of the {things[asked]}?",
        f"The price of the {things[asked]} is",
        amounts[asked],
    )


def hops(number: int, documents: int, tokens: int) -> Task:
    """Return a task: half of the documents name a person's office, the other half a fact about an office.

    An odd number of documents adds a fact about an office where no person works.
    """
    rng = random.Random(f"hops {number}")
    kind = rng.choice(KINDS)
    offices, workers = -(-documents // 2), documents // 2
    cities, names = rng.sample(CITIES, offices), people(rng, workers)
    codes = numbers(rng, offices, digits=4)
    told = [f"{who} works in the {city} office." for who, city in zip(names, cities, strict=False)]
    told += office_facts(kind, cities, codes)
    rng.shuffle(told)
    asked = rng.randrange(workers)
    return question_task(
        "hops",
        documents_with(rng, told, tokens),
        f"In which office does {names[asked]} work, and what is the {kind} of that office?",
        f"As {names[asked]} works in the",
        codes[asked],
        tokens=HOPS_TOKENS,
    )


def updates(number: int, documents: int, tokens: int) -> Task:
    """Return a task whose every document moves the same event, and a question for its last place."""
    rng = random.Random(f"updates {number}")
    event = rng.choice(EVENTS)
    rooms = numbers(rng, documents, digits=3)
    told = [
        f"On {DAYS[day % len(DAYS)]} the {event} was moved to room {room}." for day, room in enumerate(rooms)
    ]
    return question_task(
        "updates",
        documents_with(rng, told, tokens),
        f"The {event} was moved several times. To which room was it moved last?",
        f"The last time, the {event} was moved to room",
        rooms[-1],
    )


def entries(number: int, documents: int, tokens: int) -> Task:
    """Return a task with entries on similar buildings, and a question in other words."""
    rng = random.Random(f"entries {number}")
    building = rng.choice(BUILDINGS)
    names = [f"{name} {building}" for name in rng.sample(SURNAMES, documents)]
    told = list(
        zip(
            rng.sample(CITIES, documents),
            people(rng, documents),
            map(str, rng.sample(range(1850, 1990), documents)),
            (rng.choice(MATERIALS) for _ in names),
            strict=True,
        )
    )
    asides = min(len(ASIDES), max(0, words_of(tokens) - FACT_WORDS) // ASIDE_WORDS)
    texts = []
    for name, (city, architect, year, material) in zip(names, told, strict=True):
        sentences = [
            f"The {name} was designed by {architect}, who won a competition.",
            f"It was opened to the public in {year}.",
            f"The walls of the building are made of {material}.",
            *rng.sample(ASIDES, asides),
        ]
        rng.shuffle(sentences)
        texts.append(" ".join([f"The {name} is in {city}.", *sentences]))
    asked, what = rng.randrange(documents), rng.randrange(4)
    question, opening = (
        ("In which city does the {} stand?", "The {} stands in"),
        ("Who was the architect of the {}?", "The architect of the {} was"),
        ("When did the {} open?", "The {} opened in"),
        ("What are the walls of the {} made of?", "The walls of the {} are made of"),
    )[what]
    name = names[asked]
    return question_task("entries", texts, question.format(name), opening.format(name), told[asked][what])


def in_order(number: int, documents: int, tokens: int) -> Task:
    """Return a task whose documents are pieces of a text in order, and that continues with the next piece."""
    rng = random.Random(f"in-order {number}")
    sizes = [words_of(tokens)] * documents + [words_of(TEXT_TOKENS)]
    [[*pieces, after]] = installed_texts().runs(rng, 1, sizes)
    return _continuation("in-order", pieces, "Go on with this text.", after)


def mixed(number: int, documents: int, tokens: int) -> Task:
    """Return a task whose documents are pieces of different texts, and that continues one of these texts."""
    rng = random.Random(f"mixed {number}")
    runs = installed_texts().runs(rng, documents, [words_of(tokens), words_of(TEXT_TOKENS)])
    after = rng.choice([after for _, after in runs])
    return _continuation("mixed", [piece for piece, _ in runs], "Go on with one of these texts.", after)


def _continuation(family: str, pieces: Sequence[str], question: str, after: str) -> Task:
    return Task(
        family=family,
        system="You go on with texts.",
        segments=segments_of(pieces),
        question=question,
        answers=(after,),
        answer_tokens=TEXT_TOKENS,
        continuation=after,
    )
