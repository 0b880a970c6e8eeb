"""Deterministic prompts for the demo model: notes full of facts, and one question about them.

    prompt(seed, n_docs, doc_len, kind) -> {
        "system": [ids], "docs": [[ids], ...], "question": [ids], "answer": [ids, ending in <eos>],
        "kind": kind, "gold_docs": [indices],
    }

The whole prompt is system + docs[0] + ... + docs[n-1] + question; put <sep> between them only for a server
that strips it. Everything is drawn from `seed`, so an answer can only come from the prompt. Published scores
are of seeds from 20,000,000 on, choices were made on seeds from 10,000,000 on; neither was
used in training.

A document starts with a header, "# ENT :" or "# WORD :", and its facts stand between filler words:
    ENT REL VAL [VAL] .     a fact
    | REL VAL [VAL] .       a fact about the entity in the header
    @ ENT PLACE .           ENT is at PLACE, an entity, from now on

Kinds of question:
    one      "? ENT REL =>" is answered "VAL [VAL] <eos>": the fact names its subject
    head     the same question and answer, but only the header of the document names the subject
    two      "? ENT REL1 REL2 =>" is answered "ENT2 VAL <eos>": "ENT REL1 ENT2 ." stands in one document
             and "ENT2 REL2 VAL ." in a neighbour of it
    latest   "? @ ENT =>" is answered "PLACE <eos>": ENT moved at least twice, the last move counts
    both     "? @ ENT REL =>" is answered "PLACE VAL <eos>": where ENT is now, and a fact about that place
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SPECIAL = ["<unk>", "<bos>", "<eos>", "<pad>", "<sep>", "?", "=>", ".", "#", ":", "|", "<sys>", "@"]
UNK, BOS, EOS, PAD, SEP, Q, ARROW, DOT, HASH, COLON, BAR, SYS, AT = range(len(SPECIAL))

N_ENTITIES, N_RELATIONS, N_VALUES, N_WORDS = 160, 32, 160, 272
ENTITIES = range(16, 16 + N_ENTITIES)
RELATIONS = range(ENTITIES.stop, ENTITIES.stop + N_RELATIONS)
VALUES = range(RELATIONS.stop, RELATIONS.stop + N_VALUES)
WORDS = range(VALUES.stop, VALUES.stop + N_WORDS)
VOCAB = WORDS.stop

KINDS = {"one": 0, "head": 1, "two": 2, "latest": 3, "both": 4}  # the numbers enter the seed
LEARNED = tuple(KINDS)  # kinds that the model answers
FACTS = None  # of a document: as many as prompt() gives it
MAX_DRAWS = 200  # worlds that prompt() draws for one that has a question of the kind asked for


@dataclass(frozen=True)
class Question:
    """A question, its whole answer, and the documents that hold what it takes, in the order of reading."""

    kind: str
    ids: list[int]
    answer: list[int]
    docs: list[int]


@dataclass(frozen=True)
class Mix:
    """What a set of documents is made of. Chances are per document."""

    headed: float = 0.5  # chance that an entity stands in the header
    chained: float = 0.2  # chance that a relation over two documents starts here
    movers: int = 3  # entities that move
    moves: int = 1  # moves told in each document, by different movers
    second_value: float = 0.5  # chance that a value has two words
    entities: Sequence[int] = ENTITIES
    relations: Sequence[int] = RELATIONS
    values: Sequence[int] = VALUES


def vocab_words() -> list[str]:
    """The word of every token id."""
    words = SPECIAL + [f"<r{i}>" for i in range(len(SPECIAL), ENTITIES.start)]
    words += [f"ent{i}" for i in range(N_ENTITIES)] + [f"rel{i}" for i in range(N_RELATIONS)]
    return words + [f"val{i}" for i in range(N_VALUES)] + [f"w{i}" for i in range(N_WORDS)]


# Frequent and rare words, as in a real text, and now and then the end of a sentence.
_FILLERS = [*WORDS, DOT]
_CUMULATED = [0.0]
for _rank in range(N_WORDS):
    _CUMULATED.append(_CUMULATED[-1] + 1 / (_rank + 30))
_CUMULATED = [*_CUMULATED[1:], 1.08 * _CUMULATED[-1]]


def fillers(rng: random.Random, count: int) -> list[int]:
    return rng.choices(_FILLERS, cum_weights=_CUMULATED, k=count)


class World:
    """Documents and the questions that they answer.

    `lengths` are in tokens: a document is longer only if its facts do not fit. `facts` counts the facts of
    each document without the moves. The order of the random draws is part of the data.
    """

    def __init__(self, rng: random.Random, lengths: Sequence[int], facts: Sequence[int], mix: Mix):
        self.rng, self.mix, self.wanted = rng, mix, facts
        self.questions: list[Question] = []
        self.items: list[list[list[int]]] = [[] for _ in lengths]  # per document, each a list of ids
        self.used: set[tuple[int, int]] = set()  # (entity, relation) pairs that have a value
        self.short: dict[int, list[tuple[int, int, int]]] = {}  # entity -> (relation, value, document)
        self.movers = rng.sample(mix.entities, mix.movers)
        self.subjects = [entity for entity in mix.entities if entity not in self.movers]
        heads = rng.sample(self.subjects, len(lengths))
        self.heads = [head if rng.random() < mix.headed else None for head in heads]
        for doc in range(len(lengths)):
            if rng.random() < mix.chained:
                self._add_chain(doc)
        for doc in range(len(lengths)):
            while self._room(doc):
                self._add_fact(doc)
        self._add_moves()
        self.docs = [self._document(doc, length) for doc, length in enumerate(lengths)]

    def _room(self, doc: int) -> bool:
        return len(self.items[doc]) < self.wanted[doc]

    def _pair(self, subject: int | None = None) -> tuple[int, int]:
        """An (entity, relation) pair without a value, of `subject` while it has a relation left."""
        relations = self.mix.relations
        for draw in range(1000):
            if draw == 50:
                subject, relations = None, RELATIONS
            entity = subject if subject is not None else self.rng.choice(self.subjects)
            pair = entity, self.rng.choice(relations)
            if pair not in self.used:
                self.used.add(pair)
                return pair
        raise ValueError(f"{sum(self.wanted)} facts: too many for {len(self.subjects)} entities")

    def _value(self, entity: int, relation: int, doc: int) -> list[int]:
        first = self.rng.choice(self.mix.values)
        if self.rng.random() < self.mix.second_value:
            return [first, self.rng.choice(self.mix.values)]
        self.short.setdefault(entity, []).append((relation, first, doc))
        return [first]

    def _add_chain(self, doc: int) -> None:
        """A fact whose value is an entity, and a fact about that entity in a document beside it."""
        other = doc + self.rng.choice((-1, 1))
        if not 0 <= other < len(self.items) or not self._room(doc) or not self._room(other):
            return
        (subject, first), (middle, second) = self._pair(), self._pair()
        if subject == middle:
            return
        value = self.rng.choice(self.mix.values)
        self.short.setdefault(middle, []).append((second, value, other))
        self.items[doc].append([subject, first, middle, DOT])
        self.items[other].append([middle, second, value, DOT])
        self.questions += [
            Question("two", [Q, subject, first, second, ARROW], [middle, value, EOS], [doc, other]),
            Question("hop", [Q, subject, first, ARROW], [middle, EOS], [doc]),
            Question("one", [Q, middle, second, ARROW], [value, EOS], [other]),
        ]

    def _add_fact(self, doc: int) -> None:
        head = self.heads[doc] if self.rng.random() < 0.6 else None
        entity, relation = self._pair(head)
        value = self._value(entity, relation, doc)
        kind, start = ("head", BAR) if entity == head else ("one", entity)
        self.items[doc].append([start, relation, *value, DOT])
        self.questions.append(Question(kind, [Q, entity, relation, ARROW], [*value, EOS], [doc]))

    def _add_moves(self) -> None:
        """Every mover that moved gets two questions: where it is now, and what is known of that place."""
        if not self.movers or not self.short:
            return
        known = list(self.short)
        places = self.rng.sample(known, min(len(known), max(4, 2 * len(self.movers))))
        told: dict[int, list[tuple[int, int]]] = {}  # mover -> (place, document)
        for doc in range(len(self.items)):
            for mover in self.rng.sample(self.movers, min(self.mix.moves, len(self.movers))):
                here = told[mover][-1][0] if mover in told else None
                elsewhere = [place for place in places if place != here]
                if elsewhere:
                    place = self.rng.choice(elsewhere)
                    told.setdefault(mover, []).append((place, doc))
                    self.items[doc].append([AT, mover, place, DOT])
        for mover, moves in told.items():
            place, docs = moves[-1][0], [doc for _, doc in moves]
            relation, value, doc = self.rng.choice(self.short[place])
            if len(moves) > 1:
                self.questions.append(Question("latest", [Q, AT, mover, ARROW], [place, EOS], docs))
            self.questions.append(
                Question("both", [Q, AT, mover, relation, ARROW], [place, value, EOS], [*docs, doc])
            )

    def _document(self, doc: int, length: int) -> list[int]:
        """The document's facts and moves in random order, between fillers up to `length` tokens."""
        rng, items, head = self.rng, self.items[doc], self.heads[doc]
        rng.shuffle(items)
        ids = [HASH, head if head is not None else rng.choice(WORDS), COLON]
        free = max(0, length - len(ids) - sum(map(len, items)))
        cuts = sorted(rng.randrange(free + 1) for _ in items)
        done = 0
        for cut, item in zip(cuts, items, strict=True):
            ids += fillers(rng, cut - done) + item
            done = cut
        return ids + fillers(rng, free - done)


def system_segment(rng: random.Random, length: int) -> list[int]:
    return [BOS, SYS, *fillers(rng, length), DOT]


def default_facts(doc_len: int) -> int:
    """Facts per document if none are asked for: one in 16 tokens, but 3 to 12."""
    return min(12, max(3, doc_len // 16))


def prompt(
    seed: int,
    n_docs: int = 8,
    doc_len: int = 128,
    kind: str = "one",
    facts: int | None = None,
    sys_len: int = 13,
) -> dict:
    """One prompt of `n_docs` documents of `doc_len` tokens with `facts` facts each, beside one move each."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if n_docs < 2:
        raise ValueError(f"n_docs={n_docs}: expected at least 2")
    facts = default_facts(doc_len) if facts is None else facts
    if not 1 <= facts <= (doc_len - 7) // 5:
        raise ValueError(f"facts={facts}: expected 1 to {(doc_len - 7) // 5} in {doc_len} tokens")
    rng = random.Random((seed + 1) * 1000003 + n_docs * 1009 + doc_len * 17 + KINDS[kind])
    mix = Mix(
        headed=1.0 if kind == "head" else 0.5,
        chained=0.6 if kind == "two" else 0.2,
        movers=min(6, max(2, n_docs // 2)),
    )
    for _ in range(MAX_DRAWS):
        world = World(rng, [doc_len] * n_docs, [facts] * n_docs, mix)
        questions = [question for question in world.questions if question.kind == kind]
        if questions:
            break
    else:
        raise ValueError(f"no question of kind {kind!r} in {MAX_DRAWS} worlds: allow more facts or documents")
    question = rng.choice(questions)
    return {
        "system": system_segment(rng, sys_len),
        "docs": world.docs,
        "question": question.ids,
        "answer": question.answer,
        "kind": kind,
        "gold_docs": question.docs,
    }


def flat(parts: dict) -> list[int]:
    """The token ids of the whole prompt, without separators."""
    return [*parts["system"], *(token for doc in parts["docs"] for token in doc), *parts["question"]]


def show(segments: Sequence[Sequence[int]]) -> str:
    """Token ids as text, a line per segment."""
    words = vocab_words()
    return "\n".join(" ".join(words[token] for token in segment) for segment in segments)


if __name__ == "__main__":
    example = prompt(0, n_docs=3, doc_len=40, kind="both")
    print(show([example["system"], *example["docs"], example["question"], example["answer"]]))
