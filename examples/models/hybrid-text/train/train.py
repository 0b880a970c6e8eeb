"""Trains the model on a CPU, with the layers and the C++ operations of hybrid-notes.

    python train.py CORPUS OUT --minutes 60      # one thread; CORPUS is what corpus.py wrote

States are never reset and attention is never masked: every sequence is read as a model reads a long prompt.
OUT/last.pt every few minutes, and at the end; a line of losses every 50 steps.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "hybrid-notes" / "train"))

import numpy as np
import torch
import torch.nn.functional as F
from model import Config, Model
from tokenizers import Tokenizer
from torch import Tensor

CONFIG = Config(vocab=4096, hidden=256, intermediate=640, layers=8, linear_heads=8, query_heads=4, kv_heads=2)
BATCH_TOKENS = 4096
HELD_OUT = 50  # every so-manieth text is not trained on
PIECE = (60, 300)  # tokens of a piece in sequences of several texts
SAVE_MINUTES = 4.0


class Texts:
    """Token ids of texts, and sequences made of them."""

    def __init__(self, corpus: Path, *, held_out: bool):
        stored = np.load(corpus / "corpus.npz")
        parts = np.split(stored["ids"].astype(np.int64), stored["ends"][:-1])
        self.texts = [t for i, t in enumerate(parts) if (i % HELD_OUT == 0) == held_out and len(t) > 400]
        self.weights = np.cumsum([len(t) for t in self.texts])
        tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
        self.blank = np.array(tokenizer.encode("\n\n").ids)  # an empty line, behind pieces

    def sequence(self, rng: random.Random, size: int) -> np.ndarray:
        """Half of them are of as few texts as fill them; in the others pieces of several texts take turns."""
        found: list[np.ndarray] = []
        held = 0
        while held < size:
            if rng.random() < 0.5 or held:
                found.append(self._piece(rng, size))
            else:
                open_ = [self._piece(rng, size) for _ in range(rng.randint(3, 6))]
                while open_ and held < size:
                    at = rng.randrange(len(open_))
                    take = rng.randint(*PIECE)
                    found.append(np.concatenate([open_[at][:take], self.blank]))
                    open_[at] = open_[at][take:]
                    held += len(found[-1])
                    if len(open_[at]) < PIECE[0]:
                        del open_[at]
                continue
            held += len(found[-1])
        return np.concatenate(found)[:size]

    def _piece(self, rng: random.Random, most: int) -> np.ndarray:
        text = self.texts[int(np.searchsorted(self.weights, rng.randrange(self.weights[-1]), "right"))]
        begin = rng.randrange(max(1, len(text) - most))
        return text[begin : begin + most]

    def batch(self, rng: random.Random, size: int) -> Tensor:
        count = BATCH_TOKENS // size
        return torch.from_numpy(np.stack([self.sequence(rng, size) for _ in range(count)]))


def loss_of(model: Model, ids: Tensor) -> Tensor:
    hidden = model(ids, model.context(torch.ones(ids.shape)))
    logits = model.logits(hidden[:, :-1].flatten(0, 1))
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Model, texts: Texts, size: int) -> float:
    rng = random.Random(0)
    return sum(loss_of(model, texts.batch(rng, size)).item() for _ in range(12)) / 12


def rate_of(done: float, step: int, most: float) -> float:
    return most * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: %(default)s)")

    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(CONFIG)
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.95),
        foreach=True,
    )
    train, test = Texts(args.corpus, held_out=False), Texts(args.corpus, held_out=True)
    rng = random.Random(0)

    def save() -> None:
        torch.save(
            {"model": model.state_dict(), "config": asdict(CONFIG), "tokens": tokens}, args.out / "part"
        )
        (args.out / "part").replace(args.out / "last.pt")

    step = tokens = 0
    total, begun = 0.0, time.monotonic()
    saved = begun
    while (done := (time.monotonic() - begun) / 60 / args.minutes) < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate_of(done, step, args.rate)
        ids = train.batch(rng, 1024 if done < 0.6 else 2048)
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step, tokens, total = step + 1, tokens + ids.numel(), total + loss.item()
        if step % 50 == 0:
            seconds = 60 * args.minutes * done
            print(f"{step} steps, {tokens / 1e6:.2f} M tokens, {seconds:.0f} s: {total / 50:.3f}", flush=True)
            total = 0.0
        if time.monotonic() - saved > 60 * SAVE_MINUTES:
            save()
            saved = time.monotonic()
    save()
    print(f"held out: {held_out_loss(model, test, 2048):.3f} nats a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
