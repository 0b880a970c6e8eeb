"""Trains the model on a CPU; see README.md for the stretches that made the one in this folder.

    python train.py OUT --minutes 60               # starts, or goes on from OUT/last.pt
    python train.py OUT --minutes 30 --cool 1.0    # goes on, with the learning rate falling to nothing

One line of OUT/log.jsonl per 100 steps; a checkpoint with the optimiser every few minutes, and on
SIGTERM and SIGINT, which end the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from data import STAGES, Batch, Mode, draw_batch, gen
from model import Config, Model
from score import exact_match

LOG_EVERY = 100  # steps
DEV_SEED = 10_000_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=200, help="steps of rising rate (default: %(default)s)")
    parser.add_argument("--cool", type=float, default=0.0, help="last part of the time, with a falling rate")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay (default: %(default)s)")
    parser.add_argument("--reset", type=float, default=0.4, help="part of batches with reset states")
    parser.add_argument("--alone", type=float, default=0.15, help="part of batches with masked attention")
    parser.add_argument(
        "--alone-stages",
        type=int,
        nargs=2,
        default=(0, 3),
        help="first and last stage with masked attention, which is quadratic (default: %(default)s)",
    )
    parser.add_argument("--stage", type=int, help="start at this stage")
    parser.add_argument("--hold", action="store_true", help="stay in the stage")
    parser.add_argument("--easier", type=float, default=0.2, help="part of batches of an earlier stage")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        args.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(args.seed)
        self.model = Model(Config(vocab=gen.VOCAB))
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            (matrices if parameter.dim() == 2 and "embed" not in name else others).append(parameter)
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": args.decay}, {"params": others, "weight_decay": 0.0}],
            lr=args.rate,
            betas=(0.9, 0.95),
            foreach=True,
        )
        self.step, self.tokens, self.stage = 0, 0, 0
        last = args.out / "last.pt"
        if last.exists():
            saved = torch.load(last)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step, self.tokens, self.stage = saved["step"], saved["tokens"], saved["stage"]
        if args.stage is not None:
            self.stage = args.stage
        # Restarts must not repeat the data of the stretch before.
        self.rng = random.Random(args.seed * 1_000_003 + self.step)
        self.right: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # kind -> right and all tokens
        self.progress = 0.0  # smoothed share of right tokens in this stage
        self.since = 0  # batches of this stage since it began
        self.stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def log(self, **record: object) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        with (self.args.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "config": asdict(self.model.config),
            "step": self.step,
            "tokens": self.tokens,
            "stage": self.stage,
        }
        part = self.args.out / "last.part"
        torch.save(state, part)
        part.replace(self.args.out / "last.pt")

    def draw(self) -> tuple[Batch, bool]:
        """A batch, and whether it is of the current stage."""
        choice, stage = self.rng.random(), self.stage
        mode = Mode.PLAIN
        if choice < self.args.reset:
            mode = Mode.RESET
        elif choice < self.args.reset + self.args.alone:
            mode = Mode.ALONE
            stage = self.rng.randint(*self.args.alone_stages)
        elif stage and self.rng.random() < self.args.easier:
            stage = self.rng.randrange(max(0, stage - 2), stage)
        return draw_batch(self.rng, STAGES[stage], mode), stage == self.stage and mode is not Mode.ALONE

    def train_on(self, batch: Batch) -> tuple[float, list[bool]]:
        hidden = self.model(batch.ids, self.model.context(batch.keep, batch.mask))
        logits = self.model.logits(hidden.flatten(0, 1)[batch.positions])
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.item(), (logits.argmax(-1) == batch.targets).tolist()

    def rate(self, done: float, steps: int) -> float:
        """The learning rate when `done` of the time is over, after `steps` of this run."""
        rate = self.args.rate * min(1.0, (steps + 1) / self.args.warm)
        if done > 1 - self.args.cool:
            rate *= 0.01 + 0.99 * (
                0.5 + 0.5 * math.cos(math.pi * (done - 1 + self.args.cool) / self.args.cool)
            )
        return rate

    def run(self) -> None:
        begun = saved = logged = time.monotonic()
        first, loss_sum, tokens = self.step, 0.0, 0
        settings = {name: str(value) for name, value in vars(self.args).items()}
        self.log(event="start", step=self.step, current=self.stage, **settings)
        while (done := (time.monotonic() - begun) / 60 / self.args.minutes) < 1:
            rate = self.rate(done, self.step - first)
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            batch, current = self.draw()
            loss, right = self.train_on(batch)
            self.step += 1
            self.tokens += batch.ids.numel()
            tokens += batch.ids.numel()
            loss_sum += loss
            of_kind: defaultdict[str, list[bool]] = defaultdict(list)
            for kind, ok in zip(batch.kinds, right, strict=True):
                of_kind[kind].append(ok)
            for kind, oks in of_kind.items():
                count = self.right[f"{batch.mode.value}:{kind}"]
                count[0] += sum(oks)
                count[1] += len(oks)
            if current:
                self._advance(statistics.mean(sum(oks) / len(oks) for oks in of_kind.values()))
            if self.step % LOG_EVERY == 0:
                now = time.monotonic()
                self.log(
                    step=self.step,
                    stage=self.stage,
                    millions=round(self.tokens / 1e6, 2),
                    loss=round(loss_sum / LOG_EVERY, 3),
                    progress=round(self.progress, 3),
                    rate=round(rate, 6),
                    minutes=round((now - begun) / 60, 1),
                    speed=round(tokens / (now - logged)),
                    right={k: round(a / n, 3) for k, (a, n) in sorted(self.right.items())},
                )
                loss_sum, tokens, logged = 0.0, 0, now
                self.right.clear()
            if self.stopped:
                break
            if time.monotonic() - saved > 60 * self.args.save_minutes:
                self.save()
                self.evaluate()
                saved = time.monotonic()
        self.save()
        if not self.stopped:
            self.evaluate()

    def _advance(self, share: float) -> None:
        self.since += 1
        self.progress += max(0.03, 1 / self.since) * (share - self.progress)
        passed = self.since > 60 and self.progress > STAGES[self.stage].passed
        if passed and not self.args.hold and self.stage + 1 < len(STAGES):
            self.stage, self.since, self.progress = self.stage + 1, 0, 0.0
            self.log(event="stage", stage=self.stage, step=self.step)

    def evaluate(self) -> None:
        begun = time.monotonic()
        sizes = [(4, 48), (8, 64)] + ([(8, 128)] if self.stage >= 3 else [])
        scores = {
            f"{kind}@{docs}x{length}": exact_match(self.model, kind, docs, length, 32, DEV_SEED)
            for docs, length in sizes
            for kind in gen.KINDS
        }
        self.log(event="score", step=self.step, seconds=round(time.monotonic() - begun), **scores)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(Trainer(arguments()).run())
