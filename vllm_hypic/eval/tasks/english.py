"""English filler text of common words, for tasks whose answers stand in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..task import Task
from .lexicon import ACTIONS, NAMES, PLACES, QUALITIES, THINGS, TIMES

INSTRUCTIONS = (
    "Read the documents. Answer the question after them with nothing but the number that it asks for.\n\n"
)

WORDS_PER_TOKEN = 0.75
"""About what tokenizers make of English: documents are asked for in tokens and written in words."""

MOST_KEYS = 4000
"""So few of all pairs of words that finding new ones by chance is quick."""


class Writer:
    """Writes sentences and words at random; the same seed, the same text."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def sentence(self) -> str:
        """Six to sixteen words or so, and a full stop."""
        pick = self.rng.choice
        name, other, action = pick(NAMES), pick(NAMES), pick(ACTIONS)
        thing, another = f"{pick(QUALITIES)} {pick(THINGS)}", f"{pick(QUALITIES)} {pick(THINGS)}"
        place, time = pick(PLACES), pick(TIMES)
        return pick(
            (
                f"{name} {action} the {thing} near the {place}.",
                f"In the {place}, {name} {action} the {thing} and the {another}.",
                f"{time.capitalize()} {name} and {other} {action} the {thing} behind the {place}.",
                f"The {thing} from the {place} was the one that {name} {action}.",
                f"Nobody at the {place} knew why {other} {action} the {thing}.",
                f"{name} told {other} that the {thing} stood beside the {another} in the {place}.",
                f"When {name} came to the {place}, the {thing} was gone and the {another} {pick(QUALITIES)}.",
                f"There was a {thing} in every {place}, but {name} {action} only the {another}.",
                f"{other} {action} the {thing} because the {another} was too {pick(QUALITIES)}.",
            )
        )

    def number(self, taken: set[str]) -> str:
        """Seven digits that are not ``taken`` yet; takes them."""
        while (found := str(self.rng.randrange(1_000_000, 10_000_000))) in taken:
            pass
        taken.add(found)
        return found

    def keys(self, count: int) -> list[str]:
        """Different names for things, two words each; at most ``MOST_KEYS``."""
        assert count <= MOST_KEYS
        found: dict[str, None] = {}
        while len(found) < count:
            found[f"{self.rng.choice(QUALITIES)} {self.rng.choice(THINGS)}"] = None
        return list(found)

    def document(self, words: int, statements: Sequence[str]) -> str:
        """``statements`` in their order at random places between sentences: ``words`` words or, at the end
        of the last sentence, a few more; longer only if the statements are."""
        room = words - sum(len(s.split()) for s in statements)
        sentences: list[str] = []
        while room > 0:
            sentences.append(self.sentence())
            room -= len(sentences[-1].split())
        places = sorted(self.rng.randrange(len(sentences) + 1) for _ in statements)
        for place, statement in reversed(list(zip(places, statements, strict=True))):
            sentences.insert(place, statement)
        return " ".join(sentences)


def spread(rng: random.Random, statements: Sequence[str], documents: int) -> list[list[str]]:
    """Statements by document, their order kept: as many documents as there are statements, or all."""
    n = len(statements)
    places = (
        sorted(rng.sample(range(documents), n)) if n <= documents else [i * documents // n for i in range(n)]
    )
    found: list[list[str]] = [[] for _ in range(documents)]
    for place, statement in zip(places, statements, strict=True):
        found[place].append(statement)
    return found


def task(
    family: str, documents: Sequence[str], question: str, answer: str, *, answer_tokens: int = 24
) -> Task:
    """A task over documents; the right answer is a word or a number."""
    return Task(
        family=family,
        system=INSTRUCTIONS,
        segments=tuple(f"{document}\n\n" for document in documents),
        question=f"Question: {question}\nAnswer:",
        answers=(answer,),
        answer_tokens=answer_tokens,
    )
