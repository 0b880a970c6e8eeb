"""What every family of models shows in a real engine.  A family is a row of ``table.py``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.conftest import EngineFactory
from engine.engines import Ask, Engine, prompt, same
from engine.test_compiled import compiled, mode_and_calls
from engine.test_contexts_and_islands import ISLANDS, forget_streams, island_runs, islands_of
from lib.oracle.faults import CONTEXT_FAULTS

from .contract import (
    BEHIND_A_TAIL,
    COMPOSED,
    FIRST,
    LEAD,
    METHODS,
    ONE_TOKEN,
    PARTS,
    QUERY,
    TEXT,
    Models,
    RoundedT,
    Served,
    each,
    exact,
    first_token,
    largest,
    marked,
    plain_asks,
    steps_apart,
    whole_vocabulary,
)
from .rows import BF16, F32, Case, Family, LayerCase, OneLayer
from .table import CASES, FAMILIES, LAYER_CASES, LAYERS


def judged(part: str, dtypes: tuple[str, ...] = (F32, BF16)) -> list[Case]:
    """Cases that a part of the contract applies to."""
    return [c for c in CASES if c.judged and c.dtype in dtypes and part not in c.family.without]


# -- whole models against their oracles ------------------------------------------------------------------


@each("served", CASES, fast=True)
def test_composed_and_ordinary_requests_are_the_oracles(served: Served) -> None:
    """The oracle agrees, and another one does not; the leading segment is exact."""
    family, dtype = served.case.family, served.case.dtype
    ours = served.ours()
    assert served.error(ours) <= served.bound
    for fault, factor in family.planted.get(dtype, {}).items():
        assert served.error(ours, fault=fault) > factor * served.bound, fault
    if dtype != F32:
        return
    ordinary = family.ordinary or family.bound
    assert served.ordinary().largest <= ordinary
    led = first_token(served.engine, Ask(prompt(lead=[*LEAD, *FIRST], query=QUERY)))
    assert largest(led, served.oracle.full_logprobs([*LEAD, *FIRST, *QUERY])) <= ordinary
    if family.rounded:
        assert served.beside(RoundedT).error(ours) <= family.rounded
    for other in family.others:
        assert served.beside(other).error(ours) > 100 * served.bound, other.__name__


@each("served", CASES, fast=True)
def test_cold_and_warm_are_bit_identical(served: Served) -> None:
    """What is generated goes on as the oracle does; nothing is left behind."""
    served.engine.reset()
    ask = replace(COMPOSED, max_tokens=served.case.family.generated, sampling={"logprobs": -1})
    cold, warm = served.engine.ask_one_by_one(ask, ask)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    theirs = served.oracle.next_token_logprobs(*TEXT.parts, generated=warm.tokens[:-1])
    assert largest(whole_vocabulary(warm.logprobs[0][-1]), theirs) <= 2 * served.bound
    served.engine.check_clean()


@each("served", CASES, fast=True)
def test_one_batch_of_all_kinds(served: Served) -> None:
    """Prefills and decodes, composed and ordinary: each answers as it does alone."""
    served.engine.reset()
    asks = [COMPOSED, plain_asks()[2], BEHIND_A_TAIL, COMPOSED.plain(), plain_asks()[3]]
    asks += [replace(COMPOSED, extra={"hypic_seam_tokens": 0, "hypic_context": "text"})]
    if "islands" not in served.case.family.without:
        asks += [Ask(TEXT.asking().tokens, extra={"hypic_islands": ISLANDS})]
    count = (lambda i: 4 + 2 * i) if served.case.dtype == F32 else (lambda _: 1)
    asks = [replace(ask, max_tokens=count(i), sampling={"logprobs": -1}) for i, ask in enumerate(asks)]
    alone = served.engine.ask_one_by_one(*asks)
    for one, beside in zip(alone, served.engine.ask(*asks), strict=True):
        assert one.tokens == beside.tokens or served.case.dtype != F32
        assert steps_apart(one, beside) <= served.bound
    served.engine.check_clean()


COMPARED = [
    next(case for case in CASES if (case.family, case.dtype) == (family, dtype))
    for family in FAMILIES.values()
    for dtype in family.compared
]


@pytest.mark.parametrize(
    "served", [marked(case, case.family.compared[case.dtype]) for case in COMPARED], indirect=True
)
def test_plain_requests_are_stock_bit_for_bit(
    served: Served, start_engine: EngineFactory, models: Models
) -> None:
    case, family = served.case, served.case.family
    args = family.stock_args(case.dtype) | {"max_num_batched_tokens": case.chunk}
    with start_engine(models(family.name, family.save), **args) as stock:
        theirs = stock.ask(*plain_asks())
    served.engine.reset()
    served.engine.ask(COMPOSED)
    assert all(map(same, served.engine.ask(*plain_asks()), theirs))


@pytest.mark.parametrize(
    ("served", "shows"),
    [
        pytest.param(case, own, id=f"{case}-{own.__name__}", marks=() if case.fast else pytest.mark.slow)
        for case in CASES
        for own in case.family.own
    ],
    indirect=["served"],
)
def test_what_is_the_familys_own(served: Served, shows: Callable[[Served], None]) -> None:
    shows(served)


LINKED = [(case, name) for case in judged("link methods") for name in case.family.methods]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "method"),
    [pytest.param(case, name, id=f"{case}-{name}") for case, name in LINKED],
    indirect=["served"],
)
def test_link_methods(served: Served, method: str) -> None:
    """The oracle agrees, cold and warm, bit for bit."""
    extra, options = METHODS[method]
    served.engine.reset()
    ours = served.ours(extra)
    assert served.error(ours, **options) <= served.bound
    served.engine.call(forget_streams)
    assert all(map(torch.equal, ours, served.ours(extra)))
    if (factor := served.case.family.context_seen) and "context" in options:
        for fault in CONTEXT_FAULTS:
            assert served.error(ours, fault=fault, **options) > factor * served.bound, fault


@each("served", judged("islands", (F32,)))
@pytest.mark.parametrize("seam", [0, 8])
def test_islands(served: Served, seam: int) -> None:
    text, family = TEXT.asking(), served.case.family
    extra = {"hypic_islands": ISLANDS, "hypic_seam_tokens": seam}
    islands = served.engine.call(islands_of, text.tokens, extra)
    assert any(islands.values())
    ours = first_token(served.engine, Ask(text.tokens, extra=extra))
    layout: dict[str, Any] = {"head": seam, "tail": seam, "islands": islands}
    layout |= {"island_runs": served.engine.call(island_runs)}

    def error(fault: str | None = None) -> float:
        return largest(ours, served.oracle.next_token_logprobs(*text.parts, fault=fault, **layout))

    assert error() <= served.bound
    attends = set(served.oracle.layer_types) != {"linear_attention"}
    faults = ["island_counted_twice"] * attends + ["island_in_states"] * family.joins
    for fault in faults:
        assert error(fault) > family.islands_seen * served.bound, fault


@each("served", judged("second turn", (F32,)))
def test_a_second_turn_goes_on_from_the_streams_blocks(served: Served) -> None:
    served.engine.reset()
    question, more, _ = PARTS
    served.engine.ask(Ask(replace(TEXT, query=question).tokens))
    text = replace(TEXT, query=[*question, *more])
    (reused,) = served.engine.ask(Ask(text.tokens, 1, sampling={"logprobs": -1}))
    assert reused.cached > 545 + 500, "records alone are 545"
    theirs = served.oracle.next_token_logprobs(*text.parts)
    assert largest(whole_vocabulary(reused.first), theirs) <= served.bound


@each("served", judged("faults"))
def test_planted_faults_are_seen(served: Served) -> None:
    """Were the engine to make one of these mistakes, a bound would be broken, with a margin."""
    family = served.case.family
    ours, tail = served.ours(), first_token(served.engine, BEHIND_A_TAIL)
    for fault in served.oracle.faults() if family.faults is None else family.faults:
        found = [served.error(ours, fault=fault)]
        if served.case.dtype == F32:
            theirs = served.oracle.next_token_logprobs(*ONE_TOKEN.parts, fault=fault, head=8, tail=0)
            found.append(largest(tail, theirs))
        assert max(found) > family.seen[served.case.dtype] * served.bound, f"{fault}: {found}"


PREFIXES = [(family, dtype) for family in FAMILIES.values() for dtype in family.prefix]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [pytest.param(family, dtype, id=f"{family.name}-{dtype}") for family, dtype in PREFIXES],
)
def test_prefix_caches_agree(family: Family, dtype: str, start_engine: EngineFactory, models: Models) -> None:
    """Plain requests find one another's blocks as in a stock engine."""
    question, more, other = PARTS
    turns = [question, [*question, *more], [*question, *other], question]
    asks = [Ask(tuple(turn), max_tokens=4) for turn in turns]
    folder, chunks = models(family.name, family.save), {"max_num_batched_tokens": 512}
    theirs, ours = (
        start_engine(folder, **args, **chunks).ask_and_close(*asks)
        for args in (family.stock_args(dtype), family.engine_args(dtype))
    )
    assert [a.cached for a in ours] == [a.cached for a in theirs] and ours[1].cached > 0
    assert all(map(same, ours, theirs))


@pytest.mark.parametrize("name", ["mamba2", "mamba1", "olmo"])
@pytest.mark.fast("mamba2")
def test_hits_inside_a_block_are_full_recompute(
    name: str, start_engine: EngineFactory, models: Models
) -> None:
    """With ``--prefix-match-unit``: plain prompts, composed prompts, and their second turns."""
    family, (question, more, _) = FAMILIES[name], PARTS
    folder = models(family.name, family.save)
    turns = [replace(TEXT, query=query) for query in (QUERY, question, [*question, *more])]
    plain = [(*question, *more)[:n] for n in (70, 300, 310)]
    asks = [Ask(tokens, 1, sampling={"logprobs": -1}) for tokens in (*(t.tokens for t in turns), *plain)]
    engine_args = family.engine_args(F32) | {"prefix_match_unit": 16, "max_num_batched_tokens": 512}
    with start_engine(folder, max_logprobs=-1, **engine_args) as engine:
        cold, warm = (engine.ask_one_by_one(*asks) for _ in range(2))
        engine.check_clean()
    assert [answer.cached for answer in warm[3:]] == [64, 288, 304]
    oracle = family.oracle(folder)
    theirs = [oracle.next_token_logprobs(*turn.parts) for turn in turns]
    theirs += [oracle.full_logprobs(list(tokens)) for tokens in plain]
    for first, second, right in zip(cold, warm, theirs, strict=True):
        assert second.cached > first.cached
        assert max(largest(whole_vocabulary(a.first), right) for a in (first, second)) <= family.bound


# -- models of one layer ---------------------------------------------------------------------------------


@each("layer", LAYER_CASES)
def test_one_layer_is_full_recompute(layer: tuple[Engine, LayerCase]) -> None:
    """At any position, behind any seam that covers what a convolution sees; cold as warm, bit for bit."""
    engine, case = layer
    exact(engine, case.layer, case.dtype)
    engine.reset()
    cold, warm = engine.ask_one_by_one(COMPOSED, COMPOSED)
    assert warm.cached > cold.cached == 0 and same(cold, warm)
    engine.check_clean()


@each("case", [case for case in LAYER_CASES if case.dtype in case.layer.compiled])
def test_compiled(case: LayerCase, start_engine: EngineFactory, models: Models, tmp_path: Path) -> None:
    """Plain requests are those of a compiled stock engine."""
    layer, dtype = case.layer, case.dtype
    folder = models(f"layer-{layer.name}", layer.save)
    with compiled(start_engine, folder, tmp_path, **layer.stock_args(dtype)) as stock:
        first, theirs = first_token(stock, COMPOSED.plain()), stock.ask(*plain_asks())
    with compiled(start_engine, folder, tmp_path, hypic=True, **layer.engine_args(dtype)) as ours:
        assert ours.call(mode_and_calls)[0] != "NONE"
        assert torch.equal(first_token(ours, COMPOSED.plain()), first)
        assert largest(first_token(ours, COMPOSED), first) <= layer.bounds[dtype]
        assert all(map(same, ours.ask(*plain_asks()), theirs))


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in LAYERS if row.states])
def test_states_in_bfloat16(row: OneLayer, start_engine: EngineFactory, models: Models) -> None:
    """As vLLM keeps them where nobody says; the operators are PyTorch's."""
    folder, states = models(f"layer-{row.name}", row.save), {"mamba_ssm_cache_dtype": row.states}
    with start_engine(folder, **states, **row.stock_args(BF16)) as stock:
        theirs = stock.ask(*plain_asks())
    with start_engine(folder, max_logprobs=-1, **states, **row.engine_args(BF16)) as engine:
        assert all(map(same, engine.ask(*plain_asks()), theirs))
        exact(engine, row, BF16)
        engine.reset()
        assert same(*engine.ask_one_by_one(COMPOSED, COMPOSED))
