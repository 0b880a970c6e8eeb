"""English filler text of common words, for tasks whose answers stand in the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_hypic.eval.task import Task
from vllm_hypic.eval.tasks.lexicon import NAMES, THINGS, listed

INSTRUCTIONS = (
    "Read the documents. Answer the question after them with nothing but the number that it asks for.\n\n"
)

MOST_KEYS = 4000
"""Limit on keys, which are so few of all pairs of words that random draws find new keys quickly."""
PLACES = listed("""
    airport archive attic avenue bakery bank barn basement beach bridge cabin cafe canal castle cellar
    chapel church cinema clinic coast college corner cottage courtyard desert dock factory farm field
    forest garage garden gate hall harbour hill hospital hotel island kitchen lake library lighthouse
    lobby market meadow mill mountain museum office orchard palace park path pier plain port quarry
    river road school shore square stable stadium station street studio temple theatre tower town tunnel
    valley village vineyard workshop
""")
QUALITIES = listed("""
    ancient bent big black blue brass bright broken brown cheap clean cold copper crooked dark deep
    dirty dry dusty empty faded famous fine flat foreign fragile fresh golden green grey heavy hidden
    high hollow huge iron large late light little lonely long loud low narrow new noisy old open orange
    painted pale plain polished pretty purple quick quiet rare red rough round rusty shallow sharp short
    silent silver simple slow small smooth soft solid square steep strange strong tall thick thin tiny
    warm weak wet white wide wild wooden worn yellow young
""")
ACTIONS = listed("""
    admired borrowed bought brought carried caught chose cleaned collected counted covered described
    drew dropped examined fetched filled finished fixed followed found gave guarded held hid kept left
    lifted liked lost made measured mentioned missed moved needed noticed offered opened ordered packed
    painted passed picked placed pulled pushed raised reached received recognised remembered repaired
    returned sent shared showed sold stored studied threw took touched traded used visited wanted washed
    watched weighed wrapped
""")
TIMES = listed("""
    afterwards again already always before breakfast daily early eventually finally later lately often
    once quietly rarely recently seldom slowly sometimes soon suddenly today together twice usually
    yesterday
""")


class Writer:
    """Writes random sentences and words; the same seed gives the same text."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def sentence(self) -> str:
        """Return a sentence of about six to sixteen words with a full stop."""
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
        """Return a number of seven digits that is not in ``taken``, and add it to ``taken``."""
        while (found := str(self.rng.randrange(1_000_000, 10_000_000))) in taken:
            pass
        taken.add(found)
        return found

    def keys(self, count: int) -> list[str]:
        """Return ``count`` distinct names of things, two words each; ``count`` is at most ``MOST_KEYS``."""
        assert count <= MOST_KEYS
        found: dict[str, None] = {}
        while len(found) < count:
            found[f"{self.rng.choice(QUALITIES)} {self.rng.choice(THINGS)}"] = None
        return list(found)

    def document(self, words: int, statements: Sequence[str]) -> str:
        """Return a document with ``statements`` in their order at random places between sentences.  The
        document has ``words`` words, up to the end of a sentence, or more if the statements have more."""
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
    """Distribute statements over documents in order: a statement in a document, or several if documents are
    fewer than statements."""
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
    """Return a task over documents, whose right answer is a word or a number."""
    return Task(
        family=family,
        system=INSTRUCTIONS,
        segments=tuple(f"{document}\n\n" for document in documents),
        question=f"Question: {question}\nAnswer:",
        answers=(answer,),
        answer_tokens=answer_tokens,
    )
