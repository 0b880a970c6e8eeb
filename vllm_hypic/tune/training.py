"""Trains K and V of a context, so that records behind the context answer like full recompute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from .dense import Columns, Dense, joined
from .prompts import Documents, TunePrompt

WARM_STEPS = 10


@dataclass(frozen=True)
class Measured:
    """Results on held-out prompts: KL divergence to full recompute's next tokens in nats, and the increase of
    the text's NLL in percent of full recompute's."""

    kl: float
    nll: float


@dataclass(frozen=True)
class Schedule:
    steps: int
    rate: float = 2e-3
    check_steps: int = 25
    """Steps between checks on held-out prompts."""
    patience: int = 3
    """Number of successive checks without improvement that ends the training."""


class Training:
    """The training of a context.  ``start``: initial K and V of batch 1, at positions from 0 on;
    ``held_out``: prompts by kind."""

    def __init__(
        self,
        model: Dense,
        start: Columns,
        documents: Documents,
        held_out: Mapping[str, Sequence[TunePrompt]],
        schedule: Schedule,
    ) -> None:
        self._model, self._documents, self._held_out = model, documents, held_out
        self._schedule = schedule
        self._positions = start.positions
        self._parameters = [torch.nn.Parameter(x.float()) for x in (start.keys, start.values)]
        self._optimiser = torch.optim.Adam(self._parameters, lr=schedule.rate)
        self._rng = random.Random(1)
        self._step = self._worse = 0
        self._full: dict[tuple[str, int], Tensor] = {}
        self.untrained = self.measure(start)
        """Results of the untrained context."""
        self.best, self.learned = self.untrained, start
        self._checked = 0
        """The step of the last check."""

    @property
    def done(self) -> bool:
        return self._step >= self._schedule.steps or self._worse >= self._schedule.patience

    @property
    def step(self) -> int:
        return self._step

    def advance(self) -> float:
        """Train for a step, check held-out prompts if due, and return the step's loss, KL in nats."""
        schedule = self._schedule
        for group in self._optimiser.param_groups:
            rising = min(1.0, (self._step + 1) / WARM_STEPS)
            group["lr"] = schedule.rate * rising * (1 - 0.9 * self._step / schedule.steps)
        prompt = self._documents.prompt(self._rng, in_order=self._rng.random() < 0.5)
        loss = divergence(self.teacher(prompt), self.composed(prompt, self._context()))
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()
        self._step += 1
        if self._step % schedule.check_steps == 0 or self._step == schedule.steps:
            self._look()
        return loss.item()

    def finish(self) -> None:
        """Check the held-out prompts if steps came since the last check."""
        if self._step > self._checked:
            self._look()

    def _look(self) -> None:
        self._checked = self._step
        context = self._context()
        found = self.measure(context)
        better = mean_kl(found) < mean_kl(self.best)
        self._worse = 0 if better else self._worse + 1
        if better:
            keys, values = (x.detach().clone() for x in (context.keys, context.values))
            self.best, self.learned = found, Columns(keys, values, self._positions)

    def _context(self) -> Columns:
        keys, values = self._parameters
        return Columns(keys, values, self._positions)

    @torch.no_grad()
    def measure(self, context: Columns | None) -> dict[str, Measured]:
        """Return the results of a context on held-out prompts, by kind."""
        found = {}
        for name, prompts in self._held_out.items():
            divergences, ours, fulls = [], [], []
            for i, prompt in enumerate(prompts):
                if (name, i) not in self._full:
                    self._full[name, i] = self.teacher(prompt)
                full, scores = self._full[name, i], self.composed(prompt, context)
                divergences.append(divergence(full, scores).item())
                ours.append(_nll(scores, prompt.query))
                fulls.append(_nll(full, prompt.query))
            found[name] = Measured(fmean(divergences), 100 * (fmean(ours) / fmean(fulls) - 1))
        return found

    @torch.no_grad()
    def teacher(self, prompt: TunePrompt) -> Tensor:
        """Return the scores ``[query, vocabulary]`` of full recompute."""
        ids = [*prompt.lead, *(t for piece in prompt.pieces for t in piece), *prompt.query]
        return self._model.run(torch.tensor([ids]), torch.arange(len(ids)), keep=len(prompt.query))[0][0]

    def composed(self, prompt: TunePrompt, context: Columns | None) -> Tensor:
        """Return scores ``[query, vocabulary]`` with every piece as a record computed behind ``context``."""
        lead = torch.tensor([prompt.lead])
        pieces = torch.tensor(prompt.pieces)
        n, each = (0 if context is None else len(context.positions)), pieces.shape[1]
        with torch.no_grad():
            head = self._model.run(lead, torch.arange(lead.shape[1]))[1]
        records = self._model.run(pieces, n + torch.arange(each), context)[1]
        parts = [head]
        for i in range(len(pieces)):
            own = Columns(records.keys[:, i : i + 1], records.values[:, i : i + 1], records.positions)
            parts.append(self._model.moved(own, lead.shape[1] + i * each - n))
        end = lead.shape[1] + pieces.numel()
        query = torch.tensor([prompt.query])
        positions = end + torch.arange(query.shape[1])
        return self._model.run(query, positions, joined(parts), keep=query.shape[1])[0][0]

    # -- resuming after an interruption ---------------------------------------------------------

    def save(self, path: Path, settings: str) -> None:
        """Save the training's state; ``settings`` names all settings that a resuming run must share."""
        partial = path.with_name(path.name + ".partial")
        state = {
            "settings": settings,
            "parameters": [p.detach() for p in self._parameters],
            "optimiser": self._optimiser.state_dict(),
            "rng": self._rng.getstate(),
            "step": self._step,
            "worse": self._worse,
            "checked": self._checked,
            "best": {name: (m.kl, m.nll) for name, m in self.best.items()},
            "learned": (self.learned.keys, self.learned.values),
        }
        torch.save(state, partial)
        partial.replace(path)

    def resume(self, path: Path, settings: str) -> bool:
        """Restore the state of :meth:`save`; return ``False`` without a state of the same ``settings``."""
        if not path.exists():
            return False
        state = torch.load(path)
        if state["settings"] != settings:
            return False
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
                parameter.copy_(saved)
        self._optimiser.load_state_dict(state["optimiser"])
        self._rng.setstate(state["rng"])
        self._step, self._worse = state["step"], state["worse"]
        self._checked = state["checked"]
        self.best = {name: Measured(*values) for name, values in state["best"].items()}
        keys, values = state["learned"]
        self.learned = Columns(keys, values, self._positions)
        return True


def train(
    training: Training, *, seconds: float, save: Callable[[], None], told: Callable[[float], None]
) -> None:
    """Train until the schedule, the patience or ``seconds`` seconds end.  ``told`` gets each step's loss;
    ``save`` is called every minute."""
    begun = saved = time.monotonic()
    while not training.done and time.monotonic() - begun < seconds:
        told(training.advance())
        if time.monotonic() - saved > 60:
            save()
            saved = time.monotonic()
    if not training.done:  # the time is over
        save()
        training.finish()


def divergence(full: Tensor, ours: Tensor) -> Tensor:
    """Return the mean KL divergence of the rows of ``ours`` to ``full [rows, vocabulary]``, in nats."""
    p, q = full.log_softmax(-1), ours.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def mean_kl(found: Mapping[str, Measured]) -> float:
    return fmean(m.kl for m in found.values())


def _nll(scores: Tensor, ids: Sequence[int]) -> float:
    after = torch.tensor(ids[1:])[:, None]
    return -scores[:-1].log_softmax(-1).gather(1, after).mean().item()
