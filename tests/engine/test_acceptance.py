"""How many drafts are right, of composed requests beside ordinary ones: enough prompts of random models that
two points can be told from noise."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import EngineFactory
from .engines import Ask, Engine, run_apart
from .test_drafts import ARGS, NGRAMS, by_full, by_head, by_model, watched_together
from .test_drafts_of_hybrids import MTP, MTP_ARGS, SIDE_BY_SIDE, prompts
from .tiny_drafters import save_falcon, save_near, save_with_head, save_with_predictor

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


def measured(engine: Engine, batches: list[list[Ask]]) -> tuple[np.ndarray, ...]:
    """Shares ``[batches]`` of drafts that were accepted: of ordinary requests, in full, and composed."""
    found = [
        [watched_together(engine, *map(kind, batch))[1].rate for kind in (Ask.plain, by_full, replace)]
        for batch in batches
    ]
    return tuple(np.array(found).T)


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
    "MTP, Qwen3.5": Method(save_own, lambda folder: MTP, MTP_ARGS | WHOLE, prompts=400),
    "draft model, Falcon-H1": Method(save_mamba2, lambda folder: by_model(folder / "draft"), ARGS),
    "EAGLE, Falcon-H1": Method(save_mamba2, lambda folder: by_head(folder / "head"), ARGS | WHOLE),
}


@pytest.mark.slow
@pytest.mark.timeout(2400)
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
            ordinary, full, composed = rates
            # How much larger the composed share is, and the standard error of that.
            differences = composed - ordinary
            apart, error = differences.mean(), differences.std(ddof=1) / len(differences) ** 0.5
            cells = [method, f"{temperature}", "leading" if exact else "three"]
            cells += [f"{100 * share.mean():.1f}" for share in rates]
            print("|", " | ".join([*cells, f"{100 * apart:+.2f} +- {100 * error:.2f}"]), "|", flush=True)
            if abs(apart) > CLOSE + error or abs((full - ordinary).mean()) > CLOSE:
                failed.append(cells)
    assert not failed
