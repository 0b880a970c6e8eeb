"""How many drafts are right, of composed requests beside ordinary ones: enough prompts of random models that
two points can be told from noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import LAST_WORD, Ask, Engine, prompt, run_apart
from .test_drafts import ARGS, NGRAMS, by_full, by_head, by_model, counts
from .test_drafts_by_mtp import ARGS as IN_BFLOAT16
from .test_drafts_by_mtp import MTP
from .tiny_drafters import save_falcon, save_near, save_with_head
from .tiny_predictors import save_with_predictor

SIDE_BY_SIDE, ANSWER = 8, 40
# At the end of a chunk vLLM has a head read the prompt's last token for its next one; here a prompt is none.
WHOLE = {"max_num_batched_tokens": 2048}
CLOSE = 0.02
"""What shares may differ by, beside the standard error of the difference."""


@dataclass(frozen=True)
class Method:
    """What drafts: ``save(folder)`` makes its models there, ``drafts(folder)`` is vLLM's configuration,
    ``prompts`` are as many as a standard error of half a point takes where shares scatter most."""

    save: Callable[[Path], None] | None
    drafts: Callable[[Path], dict[str, Any]]
    args: dict[str, Any]
    prompts: int = 160


@dataclass(frozen=True)
class Rates:
    """Shares of drafts that were accepted, by batch of requests ``[batches]``."""

    ordinary: np.ndarray
    composed: np.ndarray
    full: np.ndarray

    def apart(self) -> tuple[float, float]:
        """How much larger the composed share is, and the standard error of that."""
        differences = self.composed - self.ordinary
        return differences.mean(), differences.std(ddof=1) / len(differences) ** 0.5


def prompts(count: int, exact: bool, temperature: float, few_words: bool) -> list[list[Ask]]:
    """Batches of prompts.  ``exact``: of one leading segment, whose record is what an ordinary prompt has;
    otherwise with two further ones."""
    asks = []
    for i in range(count):
        lead, a, b, query = random_segments([24, 60, 40, 12], vocab=480, seed=1000 + i)
        sampling: dict[str, Any] = {"temperature": temperature, "seed": i}
        if few_words:
            sampling["allowed_token_ids"] = [*a[:2], *range(LAST_WORD - 2, LAST_WORD)]
        tokens = prompt(lead=[*lead, *a], query=query) if exact else prompt(a, b, lead=lead, query=query)
        asks.append(Ask(tokens, ANSWER, sampling=sampling))
    return [asks[i : i + SIDE_BY_SIDE] for i in range(0, count, SIDE_BY_SIDE)]


def measured(engine: Engine, batches: list[list[Ask]]) -> Rates:
    kinds: dict[str, Callable[[Ask], Ask]] = {"ordinary": Ask.plain, "composed": replace, "full": by_full}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for batch in batches:
        for kind, asked in kinds.items():
            before = engine.call(counts)
            engine.ask(*map(asked, batch))
            _, tokens, accepted = (b - a for a, b in zip(before, engine.call(counts), strict=True))
            found[kind].append(accepted / tokens)
    return Rates(**{kind: np.array(rates) for kind, rates in found.items()})


def save_dense(save: Callable[..., Any], folder: Path) -> None:
    save(folder / "model", folder / "draft")


def save_mamba2(folder: Path) -> None:
    save_falcon(folder / "model", folder / "draft", folder / "head")


def save_own(folder: Path) -> None:
    save_with_predictor(folder / "model", "qwen3.5")


METHODS = {
    "n-grams": Method(None, lambda folder: NGRAMS, ARGS),
    "draft model": Method(None, lambda folder: by_model(folder / "draft"), ARGS),
    "EAGLE": Method(
        partial(save_dense, save_with_head), lambda folder: by_head(folder / "draft"), ARGS | WHOLE
    ),
    "MTP, Qwen3.5": Method(save_own, lambda folder: MTP, IN_BFLOAT16 | WHOLE, prompts=400),
    "draft model, Falcon-H1": Method(save_mamba2, lambda folder: by_model(folder / "draft"), ARGS),
    "EAGLE, Falcon-H1": Method(save_mamba2, lambda folder: by_head(folder / "head"), ARGS | WHOLE),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_as_many_drafts_are_accepted(
    method: str, start_engine: EngineFactory, attention_model: Path, tmp_path: Path, engine_logs: Path
) -> None:
    """The table of ``docs/benchmarks/cpu.md``: with ``-s``."""
    of = METHODS[method]
    model = tmp_path / "model"
    if of.save is not None:
        run_apart(of.save, tmp_path, log=engine_logs / "models.log")
    else:
        model = attention_model
        save_near(attention_model, tmp_path / "draft")
    room = of.args | {"num_gpu_blocks_override": 120, "max_num_seqs": SIDE_BY_SIDE}
    engine = start_engine(model, speculative_config=of.drafts(tmp_path), **room)
    failed = []
    for temperature in (0.0, 0.8):
        for exact in (True, False):
            rates = measured(engine, prompts(of.prompts, exact, temperature, method == "n-grams"))
            apart, error = rates.apart()
            shares = [100 * r.mean() for r in (rates.ordinary, rates.full, rates.composed)]
            cells = [method, f"{temperature}", "leading" if exact else "three"]
            cells += [f"{share:.1f}" for share in shares]
            print("|", " | ".join([*cells, f"{100 * apart:+.2f} +- {100 * error:.2f}"]), "|", flush=True)
            if abs(apart) > CLOSE + error or abs((rates.full - rates.ordinary).mean()) > CLOSE:
                failed.append(cells)
    assert not failed
