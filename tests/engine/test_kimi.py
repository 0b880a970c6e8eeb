"""Kimi-Linear and Bailing V3 on CPU: Kimi delta attention, whose channels decay apart, and attention to
latents, unrotated in the one.

Behind one linear layer composing is exact, as in :mod:`test_families`.  Whole models are held against an
oracle in float32, with the tests of :mod:`test_mamba2_oracle`.  Stock vLLM has no recurrence of this layer on
CPU; what ordinary requests are compared with has ours, and is itself held against the oracle.

vLLM's latent attention takes prompts whole in float32 and has no prefix cache there; in bfloat16 prompts come
in chunks where the CPU has AMX.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from oracle.kimi import KimiDeltaOracle
from oracle.kimi_models import MODELS, delta_oracle, save_delta_model
from oracle.oracle import LinearRecord

from vllm_hypic.patches import cpu_kimi_recurrence

from .conftest import EngineFactory
from .engines import Engine, prompt, same
from .own_layers import (  # noqa: F401  collected here, too, with the fixtures below
    BOUNDS,
    Deep,
    Saving,
    Shallow,
    engine,
    saving,
    test_a_plain_request_beside_composed_ones,
    test_bfloat16,
    test_cold_and_warm_are_bit_identical,
    test_one_layer_is_full_recompute,
    test_plain_requests_are_stock_bit_for_bit,
)
from .test_compiled import compiled, mode_and_calls
from .test_mamba2 import COMPOSED, LEAD, QUERY, SEGMENTS, exact, plain_asks
from .test_mamba2_oracle import (  # noqa: F401  likewise
    Judged,
    judged_args,
    test_islands,
    test_link_methods,
    test_planted_faults_are_seen,
)
from .test_mla import CPU_MLA
from .test_short_conv import first_token

BOUNDED = ("bounded-gates", "bailing", "bailing-experts")
DEEP = {name: 1e-3 if name in BOUNDED else 1e-4 for name in MODELS}
"""Of the engine in float32 from the oracle in float64; ordinary requests measured 1e-5, islands 4e-5. Bounded
gates of these weights hardly decay, so T keeps its norm, and its rounding to fp16 shows: 5e-4."""
ROUNDED = 1e-4
"""From the oracle whose T is rounded to fp16; measured 4e-5."""
STOCK = {"float32": CPU_MLA | {"enable_prefix_caching": False}}
"""A stock engine does not start with a prefix cache that vLLM then switches off: in float32, without AMX."""
if not torch.cpu._is_amx_tile_supported():
    STOCK["bfloat16"] = {"enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["dense", "bailing-unbounded"])
def shallow(request: pytest.FixtureRequest, saving: Saving) -> Shallow:  # noqa: F811
    folder = saving("shallow", save_delta_model, name=request.param, pairs=1, silent=True)
    return Shallow(folder, cpu_kimi_recurrence.apply, stock=STOCK)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shallow", ["bailing-unbounded"], indirect=True)
def test_compiled_engines(dtype: str, start_engine: EngineFactory, shallow: Shallow, tmp_path: Path) -> None:
    """vLLM compiles Bailing V3 and not Kimi-Linear: our operator is in the graph, with what it fuses
    beside."""
    with compiled(start_engine, shallow.folder, tmp_path, hypic=True, dtype=dtype) as ours:
        assert ours.call(mode_and_calls)[0] != "NONE"
        exact(ours, BOUNDS[dtype])
        answers = ours.ask(*plain_asks())
    with compiled(start_engine, shallow.folder, tmp_path, **shallow.stock_args(dtype)) as stock:
        assert all(map(same, answers, stock.ask(*plain_asks())))


def test_positions_do_not_matter(engine: tuple[Engine, str]) -> None:  # noqa: F811
    """A record behind any other text: once the states have forgotten what stood before, only what is attended
    differs, here nothing."""
    running, dtype = engine
    running.reset()
    long = [*LEAD, *SEGMENTS[0], *SEGMENTS[1]]
    for lead in (LEAD, long):
        ask = replace(COMPOSED, tokens=prompt(*SEGMENTS, lead=lead, query=QUERY))
        found = first_token(running, ask) - first_token(running, ask.plain())
        assert float(found.abs().max()) <= BOUNDS[dtype]


# -- whole models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedDelta(Judged):
    def beside(self, mixin: type) -> Judged:
        """The same, but for this mixin before the oracle's class."""
        other = copy(self.oracle)
        other.__class__ = type(mixin.__name__, (mixin, type(other)), {})
        other._runs, other._records = {}, {}
        return replace(self, oracle=other)


class RoundedT(Oracle):
    """Transitions as the pool holds them."""

    def _record(self, tokens: tuple[int, ...], lo: int, hi: int) -> list[Any]:
        records = super()._record(tokens, lo, hi)
        return [replace(r, T=r.T.half().to(r.T)) if isinstance(r, LinearRecord) else r for r in records]


class OneGateAHead(KimiDeltaOracle):
    """As the gated delta net has it: the mean over channels."""

    def _log_decays(self, name: str, a: torch.Tensor) -> torch.Tensor:
        g = super()._log_decays(name, a)
        return g.mean(-1, keepdim=True).expand_as(g)


@pytest.fixture(scope="module", params=MODELS)
def deep(request: pytest.FixtureRequest, saving: Saving) -> Deep:  # noqa: F811
    name: str = request.param
    return Deep(name, saving(name, save_delta_model, name=name, pairs=2), partial(delta_oracle, name=name))


@pytest.fixture(scope="module")
def judged(
    module_engine: EngineFactory,
    deep: Deep,
    judged_args: dict[str, Any],  # noqa: F811
) -> Iterator[JudgedDelta]:
    with module_engine(deep.folder, **judged_args) as started:
        yield JudgedDelta(deep.name, started, deep.oracle(deep.folder), DEEP[deep.name])


@pytest.mark.fast("dense", "bounded-gates", "bailing")
def test_composed_and_ordinary_requests(judged: JudgedDelta) -> None:
    """The oracle agrees, and another one does not: without T, or with one gate for all of a head."""
    ours, plain = judged.ours(COMPOSED), judged.ours(COMPOSED.plain())
    full = judged.oracle.full_logprobs(COMPOSED.plain().tokens)
    assert float((plain - full).abs().max()) <= ROUNDED
    assert judged.error(ours) <= judged.bound and judged.beside(RoundedT).error(ours) <= ROUNDED
    assert judged.error(ours, compose_T=False) > 100 * judged.bound
    assert judged.beside(OneGateAHead).error(ours) > 100 * judged.bound
