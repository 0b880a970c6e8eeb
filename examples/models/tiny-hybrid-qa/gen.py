"""Deterministic prompts for the demo model: questions about facts that are written in several documents.

    prompt(seed, n_docs, doc_len, kind) -> {
        "system": [ids], "docs": [[ids], ...], "question": [ids], "answer": [ids, ending in <eos>],
        "kind": kind, "gold_docs": [indices],
    }

The whole prompt is system + docs[0] + ... + docs[n-1] + question; put <sep> between them only for a server
that strips it. Everything is drawn from `seed`, so an answer can only come from the prompt. Training drew its
prompts from a generator of its own; the published scores are of seeds from 20,000,000 on.

Kinds of question:
    one     "ENT REL VAL [VAL2] ." stands in a document; "? ENT REL =>" is answered "VAL [VAL2] <eos>"
    two     "ENT REL1 ENT2 ." and "ENT2 REL2 VAL ." stand in documents; "? ENT REL1 REL2 =>" is answered
            "ENT2 VAL <eos>"
    head    as `one`, but only the header of the document names the subject: "# ENT : ... | REL VAL [VAL2] ."
    latest  one (ENT, REL) has different values in two documents; the later document is right
"""

import random

N_ENT, N_REL, N_VAL, N_FIL = 128, 24, 128, 96
SPECIAL = ["<unk>", "<bos>", "<eos>", "<pad>", "<sep>", "?", "=>", ".", "#", ":", "|", "<sys>"]
UNK, BOS, EOS, PAD, SEP, Q, ARROW, DOT, HASH, COLON, BAR, SYS = range(12)

# First ids of the entities, relations, values and filler words.
E0 = 16
R0 = E0 + N_ENT
V0 = R0 + N_REL
F0 = V0 + N_VAL
VOCAB = 512

KINDS = {"one": 0, "head": 1, "two": 2, "latest": 3}  # the numbers enter the seed
LEARNED = ("one", "two")  # kinds that the model answers
FACTS = 2  # of a document, that its state can hold


def vocab_words():
    """The word of every token id."""
    words = SPECIAL + [f"<r{i}>" for i in range(len(SPECIAL), E0)]
    words += [f"ent{i}" for i in range(N_ENT)] + [f"rel{i}" for i in range(N_REL)]
    words += [f"val{i}" for i in range(N_VAL)] + [f"w{i}" for i in range(N_FIL)]
    return words + [f"<x{i}>" for i in range(len(words), VOCAB)]


def pick(rng, start, count):
    return start + int(rng.random() * count)


def fillers(rng, count):
    return [pick(rng, F0, N_FIL) for _ in range(count)]


class World:
    """Facts spread over documents, and the questions they answer.

    The order of the random draws is part of the data: changing it changes every prompt.
    """

    def __init__(self, rng, n_docs, facts_per_doc, p_head, p_two, p_latest):
        self.rng, self.n_docs, self.facts_per_doc = rng, n_docs, facts_per_doc
        self.used = set()  # (entity, relation) pairs that have a value
        self.facts = [[] for _ in range(n_docs)]
        self.questions = []  # (kind, question ids, answer ids, gold documents)
        self.heads = self.draw_heads(p_head)
        for doc in range(n_docs):
            self.add_facts_of_two_documents(doc, p_two, p_latest)
        for doc in range(n_docs):
            while self.room(doc):
                self.add_fact_of_one_document(doc)

    def draw_heads(self, p_head):
        heads = []
        for _ in range(self.n_docs):
            head = None
            if self.rng.random() < p_head:
                head = pick(self.rng, E0, N_ENT)
                while head in heads:
                    head = pick(self.rng, E0, N_ENT)
            heads.append(head)
        return heads

    def room(self, doc):
        return len(self.facts[doc]) < self.facts_per_doc

    def fresh(self, entity=None):
        """An (entity, relation) pair without a value, of `entity` while it has a relation left."""
        tries = 0
        while True:
            tries += 1
            if tries > 60:
                entity = None
            pair = (pick(self.rng, E0, N_ENT) if entity is None else entity, pick(self.rng, R0, N_REL))
            if pair not in self.used:
                self.used.add(pair)
                return pair

    def value(self):
        """One value, or two with even chances."""
        value = [pick(self.rng, V0, N_VAL)]
        if self.rng.random() < 0.5:
            value.append(pick(self.rng, V0, N_VAL))
        return value

    def other_document(self, doc, chance):
        """A second document with this chance, if both have room."""
        if self.n_docs < 2 or self.rng.random() >= chance or not self.room(doc):
            return None
        other = int(self.rng.random() * self.n_docs)
        return other if other != doc and self.room(other) else None

    def add_facts_of_two_documents(self, doc, p_two, p_latest):
        other = self.other_document(doc, p_two)
        if other is not None:
            (ent1, rel1), (ent2, rel2) = self.fresh(), self.fresh()
            if ent1 != ent2:
                value = [pick(self.rng, V0, N_VAL)]
                self.facts[doc].append([ent1, rel1, ent2, DOT])
                self.facts[other].append([ent2, rel2, *value, DOT])
                self.questions += [
                    ("two", [Q, ent1, rel1, rel2, ARROW], [ent2, *value, EOS], [doc, other]),
                    ("hop1", [Q, ent1, rel1, ARROW], [ent2, EOS], [doc]),  # the two hops on their own
                    ("one", [Q, ent2, rel2, ARROW], [*value, EOS], [other]),
                ]
        other = self.other_document(doc, p_latest)
        if other is not None:
            (ent, rel), old, new = self.fresh(), self.value(), self.value()
            first, last = sorted((doc, other))
            self.facts[first].append([ent, rel, *old, DOT])
            self.facts[last].append([ent, rel, *new, DOT])
            self.questions.append(("latest", [Q, ent, rel, ARROW], [*new, EOS], [first, last]))

    def add_fact_of_one_document(self, doc):
        value, head = self.value(), self.heads[doc]
        if head is not None and self.rng.random() < 0.6:
            left = sum(1 for entity, _ in self.used if entity == head) < N_REL
            ent, rel = self.fresh(head) if left else self.fresh()
            if ent == head:
                self.facts[doc].append([BAR, rel, *value, DOT])
                self.questions.append(("head", [Q, ent, rel, ARROW], [*value, EOS], [doc]))
                return
        ent, rel = self.fresh()
        self.facts[doc].append([ent, rel, *value, DOT])
        self.questions.append(("one", [Q, ent, rel, ARROW], [*value, EOS], [doc]))

    def document(self, doc, doc_len):
        """The document's facts in random order, between fillers up to `doc_len` tokens."""
        rng, facts, head = self.rng, self.facts[doc], self.heads[doc]
        rng.shuffle(facts)
        out = [HASH, head if head is not None else pick(rng, F0, N_FIL), COLON]
        free = max(0, doc_len - len(out) - sum(map(len, facts)))
        cuts = sorted(int(rng.random() * (free + 1)) for _ in facts)
        done = 0
        for cut, fact in zip(cuts, facts, strict=True):
            out += fillers(rng, cut - done) + fact
            done = cut
        return out + fillers(rng, free - done)


def prompt(seed, n_docs=8, doc_len=96, kind="one", facts=None, sys_len=13, heads=None):
    """One prompt. `facts` is facts per document, by default doc_len // 16 but 3 to 12.

    `heads` is the chance that a document has a subject in its header.
    """
    rng = random.Random((seed + 1) * 1000003 + n_docs * 1009 + doc_len * 17 + KINDS[kind])
    if facts is None:
        facts = min(12, max(3, doc_len // 16))
    if heads is None:
        heads = 1.0 if kind == "head" else 0.5
    p_two = 0.5 if kind == "two" else 0.1
    p_latest = 0.5 if kind == "latest" else 0.1
    while True:
        world = World(rng, n_docs, facts, heads, p_two, p_latest)
        docs = [world.document(doc, doc_len) for doc in range(n_docs)]
        questions = [question for question in world.questions if question[0] == kind]
        if questions:
            break
    _, question, answer, gold = questions[int(rng.random() * len(questions))]
    system = [BOS, SYS, *fillers(rng, sys_len), DOT]
    return {
        "system": system,
        "docs": docs,
        "question": question,
        "answer": answer,
        "kind": kind,
        "gold_docs": gold,
    }


def flat(parts):
    """The token ids of the whole prompt, without separators."""
    return [*parts["system"], *(token for doc in parts["docs"] for token in doc), *parts["question"]]


def show(segments):
    """Token ids as text, a line per segment."""
    words = vocab_words()
    return "\n".join(" ".join(words[token] for token in segment) for segment in segments)


if __name__ == "__main__":
    example = prompt(0, n_docs=3, doc_len=32, kind="two")
    print(show([example["system"], *example["docs"], example["question"], example["answer"]]))
