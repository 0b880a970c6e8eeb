"""Speculative decoding of models with linear layers by a model of full attention, or by a head: its layers
compose beside those of the model, and change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from .conftest import EngineFactory
from .engines import Ask, Engine, EngineError, audit, poison_cache, run_apart, same
from .test_acceptance import prompts
from .test_drafts import (
    ANSWER,
    ARGS,
    Drafted,
    by_full,
    by_head,
    by_model,
    crowd,
    free,
    preemptions,
    watched,
)
from .test_drafts_by_mtp import ARGS as OF_A_HEAD
from .test_drafts_by_mtp import rate, read_no_records
from .test_drafts_of_hybrids import alike
from .tiny_drafters import save_another, save_falcon, save_qwen

# A chunk must hold a block of states, 256 tokens, and vLLM sets aside some of it for a draft model.
IN_BFLOAT16 = OF_A_HEAD | {"max_num_batched_tokens": 512}
WELL, FAIRLY = 0.7, 0.15
"""Shares of drafts that are right here, at least, by models that draft well and not so well; those of a model
that reads no records are far below."""


def bit_identical(drafting: Engine) -> list[tuple[Drafted, Drafted]]:
    """What is drafted of composed prompts, and of the same ones without separators: warm as cold, ``full`` as
    these."""
    found = []
    for ask in free():
        cold, warm = watched(drafting, ask), watched(drafting, ask)
        assert same(cold[0], warm[0]) and cold[1] == warm[1] and warm[0].cached > cold[0].cached
        ordinary, full = watched(drafting, ask.plain()), watched(drafting, by_full(ask))
        assert same(ordinary[0], full[0]) and ordinary[1] == full[1]
        found.append((cold[1], ordinary[1]))
    return found


def side_by_side(drafting: Engine, expected: list[Any]) -> None:
    before = drafting.call(preemptions)
    assert [a.samples for a in drafting.ask(*crowd())] == [a.samples for a in expected]
    assert drafting.call(preemptions) > before, "there was room for all: nothing is shown"
    left = drafting.call(audit)
    assert left.clean, left


@pytest.mark.slow
def test_beside_mamba2(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    """In float32, in which a model and its draft of the same layer agree.  Stock vLLM answers otherwise here:
    on CPU its Mamba2 keeps no state behind each draft."""
    model, draft, head = (tmp_path / name for name in ("model", "draft", "head"))
    run_apart(save_falcon, model, draft, head, log=engine_logs / "models.log")
    asked = [*free(), replace(free()[0], extra={"hypic_context": "lead"})]
    [leading] = prompts(8, exact=True, temperature=0.0, few_words=False)
    args = ARGS | {"num_gpu_blocks_override": 40}
    with start_engine(model, **args) as plain:
        answers = [plain.ask_one_by_one(ask, ask.plain()) for ask in asked]
        together = plain.ask_one_by_one(*crowd())
    for drafts in (by_model(draft), by_head(head)):
        with start_engine(model, speculative_config=drafts, **args) as drafting:
            for ask, expected in zip(asked, answers, strict=True):
                given = [drafting.ask(one)[0].tokens for one in (ask, ask.plain())]
                assert given == [answer.tokens for answer in expected]
            drafting.reset()
            composed, ordinary = zip(*bit_identical(drafting), strict=True)
            assert rate(composed) > WELL and rate(ordinary) > WELL, (composed, ordinary)
            for ask in leading:
                # Its record is exact, and what a head has read of it, too.
                assert watched(drafting, ask)[1] == watched(drafting, ask.plain())[1]
            side_by_side(drafting, together)
            drafting.reset()
            drafting.call(read_no_records)
            blind = [watched(drafting, ask)[1] for ask in free()]
            assert rate(blind) < WELL / 2, blind


def test_beside_a_gated_delta_net(start_engine: EngineFactory, tmp_path: Path, engine_logs: Path) -> None:
    """Two layers for Qwen3.5, of which stock code runs the rows: in bfloat16 answers are those without drafts
    until two tokens are as good as each other."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    run_apart(save_qwen, model, draft, log=engine_logs / "models.log")
    with start_engine(model, **IN_BFLOAT16) as plain:
        answers = [plain.ask_one_by_one(ask, ask.plain()) for ask in free()]
    drafting = start_engine(model, speculative_config=by_model(draft), mended=poison_cache, **IN_BFLOAT16)
    same_tokens = 0
    for ask, expected in zip(free(), answers, strict=True):
        given = drafting.ask_one_by_one(ask, ask.plain())
        same_tokens += sum(map(alike, given, expected))
    assert same_tokens > len(answers)
    drafting.reset()
    composed, ordinary = zip(*bit_identical(drafting), strict=True)
    assert rate(composed) > FAIRLY and rate(ordinary) > FAIRLY, (composed, ordinary)
    drafting.reset()
    drafting.call(read_no_records)
    assert rate([watched(drafting, ask)[1] for ask in free()]) < FAIRLY / 2


def test_a_draft_model_has_blocks_of_its_own(
    start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """Its layer is in another group of vLLM's cache than the model's.  With the blocks of that, which stock
    vLLM gives it, answers are others."""
    model, draft, head, another = (tmp_path / name for name in ("model", "draft", "head", "another"))
    run_apart(save_falcon, model, draft, head, log=engine_logs / "models.log")
    save_another(draft, another)
    asked = [given for ask in free() for given in (ask, ask.plain())]
    args = ARGS | {"num_gpu_blocks_override": 40}
    with start_engine(model, **args) as plain:
        expected = plain.ask_one_by_one(*asked)
    drafts = by_model(another)
    with start_engine(model, speculative_config=drafts, mended=poison_cache, **args) as drafting:
        answers = drafting.ask_one_by_one(*asked)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    narrow = args | {"enable_prefix_caching": True, "max_num_batched_tokens": 128}
    with pytest.raises(
        EngineError, match=r"128 tokens, and what is set aside .*expected 129 or more"
    ) as refused:
        start_engine(model, speculative_config=drafts, **narrow)
    assert refused.value.kind == "ConfigError"


@pytest.mark.slow
def test_a_head_behind_a_prefix_that_others_go_on_from(
    start_engine: EngineFactory, tmp_path: Path, engine_logs: Path
) -> None:
    """What others' records have read of the token behind a page, where prompts part, is not read here."""
    model, draft, head = (tmp_path / name for name in ("model", "draft", "head"))
    run_apart(save_falcon, model, draft, head, log=engine_logs / "models.log")
    page, pages = 16, 5
    common, *rest = random_segments([pages * page, *[20] * 12], vocab=480, seed=3)
    asked = [Ask((*common, *own), ANSWER) for own in rest]
    options = {"prefix": "sparse", "page_tokens": page}
    args = ARGS | {"num_gpu_blocks_override": 40, "options": options}
    with start_engine(model, speculative_config=by_head(head), **args) as drafting:
        after_others = [watched(drafting, ask) for ask in asked]
        for ask, (answer, drafted) in zip(asked, after_others, strict=True):
            drafting.reset()
            alone, of_alone = watched(drafting, ask)
            assert alone.tokens == answer.tokens and of_alone == drafted and alone.cached == 0
    assert max(answer.cached for answer, _ in after_others) == (pages - 1) * page
