"""Exact match of greedy answers on the generator's prompts."""

from __future__ import annotations

import torch
from data import gen
from model import Model


@torch.no_grad()
def exact_match(
    model: Model, kind: str, docs: int, length: int, count: int, seed: int, batch: int = 8
) -> float:
    """The share of `count` prompts from `seed` on with a right answer to the last token.

    The right answer is fed in: its tokens are all the most likely ones exactly if greedy decoding finds it.
    """
    right = 0
    for start in range(seed, seed + count, batch):
        prompts = [gen.prompt(s, docs, length, kind) for s in range(start, min(seed + count, start + batch))]
        sequences = [gen.flat(prompt) + prompt["answer"] for prompt in prompts]
        ids = torch.full((len(sequences), max(map(len, sequences))), gen.PAD)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        hidden = model(ids, model.context(torch.ones(ids.shape)))
        for state, prompt, sequence in zip(hidden, prompts, sequences, strict=True):
            answer = prompt["answer"]
            states = state[len(sequence) - len(answer) - 1 : len(sequence) - 1]
            right += model.logits(states).argmax(-1).tolist() == answer
    return right / count
