"""Training batches: documents, then many questions about them, answered one after another.

A batch is of one of three modes, so that the model has to learn both of its memories:

    plain    everything sees everything; all kinds of question
    reset    the recurrent states are zero at the start of every document and question, so that what lies in
             other segments can only come from the full-attention layers; no question about moves
    alone    a segment's attention sees itself and the system segment, so that what lies in other documents
             can only come from the recurrent states; only the questions about moves that take no fact
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import gen


class Mode(Enum):
    PLAIN = "plain"
    RESET = "reset"
    ALONE = "alone"


@dataclass(frozen=True)
class Stage:
    """One difficulty: pairs are the smallest and the largest number drawn."""

    tokens: int  # of a sequence, at most
    batch: int  # sequences
    docs: tuple[int, int]
    doc_len: tuple[int, int]
    facts: tuple[int, int]  # per document
    vocabulary: float  # part of the entities, relations and values
    passed: float  # share of right answer tokens, mean over kinds, that takes up the next stage


STAGES = [
    Stage(80, 18, (1, 2), (8, 16), (1, 3), 0.1, 0.80),
    Stage(112, 12, (1, 2), (16, 30), (1, 3), 0.2, 0.80),
    Stage(160, 9, (2, 3), (20, 34), (1, 3), 0.4, 0.80),
    Stage(256, 6, (2, 5), (24, 48), (2, 4), 1.0, 0.88),
    Stage(512, 4, (3, 8), (32, 80), (2, 5), 1.0, 0.93),
    Stage(1024, 2, (4, 12), (40, 110), (2, 7), 1.0, 0.96),
    Stage(1664, 2, (6, 16), (64, 140), (3, 9), 1.0, 2.0),
]


# Rarer questions count for more.
WEIGHTS = {"one": 1.0, "head": 1.0, "hop": 2.0, "two": 2.0, "latest": 4.0, "both": 4.0}


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [B, T], padded to the longest
    keep: Tensor  # [B, T], see model.Context
    mask: Tensor | None
    positions: Tensor  # flat indices of tokens that are followed by an answer's token
    targets: Tensor  # those tokens
    kinds: list[str]  # of the question of each target
    weights: Tensor  # of each target in the loss
    mode: Mode


def first(ids: range, part: float) -> range:
    """The first ids, at least four: what a model is taught with few words it finds sooner."""
    return ids[: max(4, round(part * len(ids)))]


def draw_world(rng: random.Random, stage: Stage, mode: Mode) -> gen.World:
    count = rng.randint(*stage.docs)
    lengths = [rng.randint(*stage.doc_len) for _ in range(count)]
    facts = [
        rng.randint(stage.facts[0], min(stage.facts[1], max(3, (length - 7) // 5))) for length in lengths
    ]
    if mode is Mode.ALONE:
        facts = [min(2, fact) for fact in facts]
    movers = rng.randint(1, 2) if count < 3 else rng.randint(2, 6)
    moves = 1 if mode is Mode.RESET else rng.choice((1, 1, 2)) if mode is Mode.PLAIN else rng.randint(1, 3)
    entities: Sequence[int] = first(gen.ENTITIES, stage.vocabulary)
    relations: Sequence[int] = first(gen.RELATIONS, stage.vocabulary)
    if rng.random() < 0.3:  # facts that differ in their subject alone, or in their relation alone
        relations = rng.sample(relations, min(len(relations), rng.randint(3, 8)))
    if rng.random() < 0.3:
        entities = rng.sample(entities, min(len(entities), count + movers + rng.randint(2, 12)))
    mix = gen.Mix(
        headed=rng.choice((0.0, 0.5, 0.5, 1.0)),
        chained=rng.choice((0.0, 0.4, 0.8)),
        movers=movers,
        moves=min(moves, movers),
        entities=entities,
        relations=relations,
        values=first(gen.VALUES, stage.vocabulary),
    )
    return gen.World(rng, lengths, facts, mix)


def select(rng: random.Random, questions: list[gen.Question], mode: Mode) -> list[gen.Question]:
    """The questions of this mode, in random order; of those that give each other away, one or the other."""
    chains, places = rng.random() < 0.6, rng.random() < 0.5
    chosen = []
    for q in questions:
        if mode is Mode.ALONE:
            wanted = q.kind == "latest"
        elif q.kind in ("latest", "both"):
            wanted = mode is Mode.PLAIN and (q.kind == "latest") == places
        else:
            wanted = q.kind != "hop" if chains else q.kind != "two"
        if wanted:
            chosen.append(q)
    rng.shuffle(chosen)
    return chosen


def draw_batch(rng: random.Random, stage: Stage, mode: Mode) -> Batch:
    rows = 2 * stage.batch if mode is Mode.ALONE else stage.batch  # it has few questions
    ids = torch.full((rows, stage.tokens), gen.PAD)
    keep = torch.ones(rows, stage.tokens)
    owner = torch.zeros(rows, stage.tokens, dtype=torch.int16)  # the segment of every token
    targets: list[tuple[int, int, int, str]] = []  # row, position before it, token, kind
    longest = 0
    for row in range(rows):
        while True:
            world = draw_world(rng, stage, mode)
            questions = select(rng, world.questions, mode)
            system = gen.system_segment(rng, rng.randint(2, min(16, stage.tokens // 20)))
            if questions and len(system) + sum(map(len, world.docs)) <= 0.8 * stage.tokens:
                break
        segments, answers = [system, *world.docs], [0] * (1 + len(world.docs))
        for question in questions:
            segments.append(question.ids + question.answer)
            answers.append(len(question.answer))
        start = 0
        for number, (segment, answer) in enumerate(zip(segments, answers, strict=True)):
            end = start + len(segment)
            if end > stage.tokens:
                break
            ids[row, start:end] = torch.tensor(segment)
            owner[row, start:end] = number
            if mode is Mode.RESET and number:
                keep[row, start] = 0
            for at in range(end - answer, end):
                kind = questions[number - 1 - len(world.docs)].kind
                targets.append((row, at - 1, segment[at - start], kind))
            start = end
            longest = max(longest, end)
    ids, keep, owner = (x[:, :longest].contiguous() for x in (ids, keep, owner))
    positions = torch.tensor([row * longest + at for row, at, _, _ in targets])
    kinds = [kind for *_, kind in targets]
    weights = torch.tensor([WEIGHTS[kind] for kind in kinds])
    mask = None
    if mode is Mode.ALONE:
        own = owner[:, :, None] == owner[:, None]
        mask = ((own | (owner == 0)[:, None]) & torch.ones(longest, longest).tril().bool())[:, None]
    return Batch(
        ids, keep, mask, positions, torch.tensor([token for _, _, token, _ in targets]), kinds, weights, mode
    )
