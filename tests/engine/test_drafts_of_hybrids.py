"""Speculative decoding of models with linear layers: by n-grams, by the head that comes with their weights
(multi-token prediction), by a model of full attention and by its head.

What is behind every draft has a slot of its own, and layers that draft compose beside those of the model: no
draft changes an answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import random_segments, save_mamba2_model, save_olmo_model, save_short_conv_model

from .conftest import EngineFactory, Saver, lent
from .engines import LAST_WORD, Answer, Ask, Engine, EngineError, all_same, prompt
from .test_drafts import (
    ANSWER,
    ARGS,
    DRAFTS,
    MAX_MODEL_LEN,
    NGRAMS,
    Drafted,
    asks,
    by_full,
    by_head,
    by_model,
    check_crowd,
    cold_as_warm,
    counts,
    crowd,
    free,
    plain_as_full,
    watched,
)
from .test_images import DOCUMENT, LEAD, PICTURE, QUERY, SECOND, TALL, WIDE
from .tiny_drafters import SAVED, save_another, save_falcon, save_qwen, save_with_predictor

LAYERS = ["linear_attention", "full_attention"] * 2


def poison_cache() -> None:
    """What to give as ``mended``: all of vLLM's cache but its null block holds values that are no numbers, so
    that whoever reads what nobody wrote is found out."""
    from vllm.v1.worker import gpu_model_runner as runner

    stock = runner.allocate_kv_cache

    def allocate(config: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(config, *args, **kwargs)
        for layer in found.values():
            layer.untyped_storage().fill_(255)
        for layer in found.values():
            layer[: len(layer) // config.num_blocks].zero_()
        return found

    runner.allocate_kv_cache = allocate


@pytest.fixture(scope="module")
def model(saved: Saver) -> Path:
    """OLMo-Hybrid, of which all rows are ours on CPUs, in float32."""
    return saved(partial(save_olmo_model, layer_types=LAYERS))


IN_FLOAT32 = ARGS | {"num_gpu_blocks_override": 40}


@pytest.fixture(scope="module")
def _drafting(module_engine: EngineFactory, model: Path) -> Engine:
    return module_engine(model, speculative_config=NGRAMS, **IN_FLOAT32)


@pytest.fixture(scope="module")
def _plain(module_engine: EngineFactory, model: Path) -> Engine:
    return module_engine(model, **IN_FLOAT32)


drafting, plain = lent("_drafting"), lent("_plain")


@pytest.mark.fast("0", "1")
@pytest.mark.parametrize("number", range(3))
def test_answers_are_those_without_drafts(drafting: Engine, plain: Engine, number: int) -> None:
    ask = asks()[number]
    expected = plain.ask_one_by_one(ask, ask.plain(), by_full(ask))
    found = [cold_as_warm(drafting, ask), *(watched(drafting, a) for a in (ask.plain(), by_full(ask)))]
    for (answer, drafted), wanted in zip(found, expected, strict=True):
        assert answer.tokens == wanted.tokens
        assert 0 < drafted.accepted < drafted.tokens, drafted


def test_requests_side_by_side(drafting: Engine, plain: Engine) -> None:
    """Some have drafts, some none, some begin or are computed anew."""
    check_crowd(drafting, crowd(asks), plain.ask_one_by_one(*crowd(asks)))


def go_on_behind_the_first(llm: Any) -> None:
    """Plant a fault: what was accepted is forgotten."""
    from vllm_hypic.backends.linear.gdn.cpu import CPUDeltaNet

    stock = CPUDeltaNet.drafted

    def forgetful(self: Any, metadata: Any) -> Any:
        found = stock(self, metadata)
        return found and replace(found, before=found.behind[:, 0])

    CPUDeltaNet.drafted = forgetful  # type: ignore[method-assign]


ROOM = ARGS | {"num_gpu_blocks_override": 80}
CACHED = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
"""All ends of blocks, of answers, too."""


def test_states_at_ends_of_blocks(start_engine: EngineFactory, model: Path, plain: Engine) -> None:
    """Second turns go on from states that stood within passes with drafts; and a planted fault is seen."""
    drafting = start_engine(model, speculative_config=NGRAMS, **ROOM | CACHED)
    ask = asks(3, 200)[0]
    expected = plain.ask_one_by_one(ask, ask.plain())
    for asked, wanted in zip((ask, ask.plain()), expected, strict=True):
        answer, drafted = watched(drafting, asked)
        assert answer.tokens == wanted.tokens and drafted.accepted > 0
        turn = replace(asked, tokens=(*asked.tokens, *answer.tokens, *asked.tokens[-7:]), max_tokens=ANSWER)
        [second], [fresh] = drafting.ask(turn), plain.ask(turn)
        assert second.tokens == fresh.tokens
    assert second.cached > len(asked.tokens)
    drafting.call(go_on_behind_the_first)
    assert drafting.ask(ask)[0].tokens != expected[0].tokens


def some_are_right(drafting: Engine) -> None:
    """Of all that the engine has drafted."""
    _, tokens, accepted = counts(drafting)
    assert 0 < accepted < tokens


FEW = [*asks(1)[:2], *(ask.plain() for ask in asks(2)[:2])]
OTHERS: dict[str, Callable[..., Any]] = {
    "NemotronH": partial(save_mamba2_model, name="NemotronH"),
    "FalconH1": partial(save_mamba2_model, name="FalconH1"),
    "Lfm2": partial(save_short_conv_model, layer_types=["conv", "full_attention", "conv"]),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.fast("NemotronH")
def test_other_linear_layers(name: str, start_engine: EngineFactory, saved: Saver) -> None:
    """Mamba2 and short convolutions, whose rows are stock code's, in float32 and with a prefix cache."""
    folder = saved(OTHERS[name])
    wanted = [a.tokens for a in start_engine(folder, **ROOM).ask_and_close(*FEW)]
    drafting = start_engine(folder, speculative_config=NGRAMS, **ROOM | CACHED)
    cold = drafting.ask_one_by_one(*FEW)
    some_are_right(drafting)
    warm = drafting.ask_one_by_one(*FEW[:2])
    drafting.reset()
    assert [a.tokens for a in cold] == [a.tokens for a in drafting.ask(*FEW)] == wanted
    assert [a.tokens for a in warm] == wanted[:2]
    drafting.check_clean()


CLOSE = 0.15
"""Of logprobs of two tokens that bfloat16 may confuse."""


def alike(answer: Answer, wanted: Answer) -> bool:
    """Whether all tokens are the same; otherwise the first that differs is as good as the other, or this
    fails."""
    apart = next((i for i in range(ANSWER) if answer.tokens[i] != wanted.tokens[i]), None)
    if apart is not None:
        ours, theirs = (a.logprobs[0][apart][a.tokens[apart]] for a in (answer, wanted))
        assert abs(ours - theirs) < CLOSE
    return apart is None


@pytest.mark.slow
def test_stock_rows_of_qwen(start_engine: EngineFactory, hybrid_model: Path, hypic: Engine) -> None:
    """Where stock code runs the rows, in bfloat16: answers are those without drafts until two tokens are as
    good as each other."""
    args = {"speculative_config": NGRAMS, "disable_log_stats": False}
    drafting = start_engine(hybrid_model, mended=poison_cache, **args)
    expected = hypic.ask_one_by_one(*FEW)
    cold, warm = drafting.ask_one_by_one(*FEW), drafting.ask_one_by_one(*FEW)
    side_by_side = drafting.ask(*FEW)
    assert all_same(cold[:2], warm[:2])
    assert 2 * sum(map(alike, [*cold, *side_by_side], [*expected, *expected])) > len(FEW)
    some_are_right(drafting)


MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
# Chunks, and all ends of blocks are kept.
MTP_ARGS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 256}
MTP_ARGS |= {"prefix_cache_retention_interval": None, "disable_log_stats": False}
CLOSE_RATES, BLIND = 0.2, 0.3
"""How far shares of drafts that are right may lie apart, and what reading no records costs at least.

Three prompts of some 150 drafts say little: over 30 prompts the composed share is lower by 0.03, give or take
0.03 (two standard errors), hence 0.1 for three of them; ``epic-0``, without seams, has the most of it.
The bound is four standard errors.  Reading no records costs 0.4 and more.
"""


def rate(drafts: Sequence[Drafted]) -> float:
    return sum(d.accepted for d in drafts) / sum(d.tokens for d in drafts)


def read_no_records(llm: Any) -> None:
    """Plant a fault: the head sees its streams alone."""
    from vllm_hypic.engine.drafter import ComposingDrafter
    from vllm_hypic.pool.step import StepContext

    stock = ComposingDrafter._begin

    def begin(self: Any, step: StepContext) -> None:
        stock(self, step)
        self.runtime.step = StepContext([], step.captures, step.device, step.batch)

    ComposingDrafter._begin = begin  # type: ignore[method-assign]


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.fast("qwen3.5-vision")
def test_drafts_of_the_models_own_head(name: str, start_engine: EngineFactory, saved: Saver) -> None:
    """In bfloat16 answers are those without drafts until two tokens are as good as each other."""
    model = saved(save_with_predictor, name)
    asked = [(ask, ask.plain(), by_full(ask)) for ask in free()]
    if name == "qwen3.5-vision":
        tokens = prompt(DOCUMENT, SECOND, lead=LEAD, query=[*PICTURE, *QUERY])
        seen = Ask(tokens, ANSWER, media={"image": [TALL, WIDE]})
        asked.append((seen, seen.plain(), by_full(seen)))
    with start_engine(model, **MTP_ARGS) as plain:
        expected = [plain.ask_one_by_one(*of) for of in asked]
    drafting = start_engine(model, speculative_config=MTP, mended=poison_cache, **MTP_ARGS)
    composed, ordinary, same_tokens = list[Drafted](), list[Drafted](), 0
    for (ask, *_), wanted in zip(asked, expected, strict=True):
        cold, plain_too = cold_as_warm(drafting, ask), plain_as_full(drafting, ask)
        same_tokens += sum(map(alike, (cold[0], plain_too[0], plain_too[0]), wanted))
        composed.append(cold[1])
        ordinary.append(plain_too[1])
    assert 2 * same_tokens > 3 * len(asked)
    assert rate(ordinary) > 0.5 and abs(rate(composed) - rate(ordinary)) < CLOSE_RATES, (composed, ordinary)
    drafting.reset()
    answers = drafting.ask(*(ask for of in asked for ask in of))
    for answer, wanted in zip(answers, (w for of in expected for w in of), strict=True):
        alike(answer, wanted)
    drafting.check_clean()
    drafting.call(read_no_records)
    drafting.reset()
    assert rate([watched(drafting, ask)[1] for ask, *_ in asked]) < rate(ordinary) - BLIND


# A chunk must hold a block of states, 256 tokens, and vLLM sets aside some of it for a draft model.
IN_BFLOAT16 = MTP_ARGS | {"max_num_batched_tokens": 512}
WELL, FAIRLY = 0.7, 0.15
"""Shares of drafts that are right here, at least, by models that draft well and not so well; those of a model
that reads no records are far below."""


def bit_identical(drafting: Engine) -> tuple[list[Drafted], list[Drafted]]:
    """What is drafted of composed prompts, and of the same ones without separators: warm as cold, ``full`` as
    these."""
    return [cold_as_warm(drafting, a)[1] for a in free()], [plain_as_full(drafting, a)[1] for a in free()]


@dataclass(frozen=True)
class Falcon:
    """A Falcon-H1 of one layer, and what drafts for it."""

    model: Path
    draft: Path
    head: Path


@pytest.fixture(scope="module")
def falcon(saved: Saver, tmp_path_factory: pytest.TempPathFactory) -> Falcon:
    draft, head = (tmp_path_factory.mktemp("falcon") / name for name in ("draft", "head"))
    return Falcon(saved(save_falcon, draft, head), draft, head)


SIDE_BY_SIDE = 8


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
        asks.append(Ask(tokens, 40, sampling=sampling))
    return [asks[i : i + SIDE_BY_SIDE] for i in range(0, count, SIDE_BY_SIDE)]


@pytest.mark.slow
def test_beside_mamba2(start_engine: EngineFactory, falcon: Falcon) -> None:
    """In float32, in which a model and its draft of the same layer agree.  Stock vLLM answers otherwise here:
    on CPU its Mamba2 keeps no state behind each draft."""
    asked = [*free(), replace(free()[0], extra={"hypic_context": "lead"})]
    [leading] = prompts(8, exact=True, temperature=0.0, few_words=False)
    with start_engine(falcon.model, **IN_FLOAT32) as plain:
        answers = [plain.ask_one_by_one(ask, ask.plain()) for ask in asked]
        together = plain.ask_one_by_one(*crowd())
    for drafts in (by_model(falcon.draft), by_head(falcon.head)):
        with start_engine(falcon.model, speculative_config=drafts, **IN_FLOAT32) as drafting:
            for ask, expected in zip(asked, answers, strict=True):
                given = [drafting.ask(one)[0].tokens for one in (ask, ask.plain())]
                assert given == [answer.tokens for answer in expected]
            drafting.reset()
            composed, ordinary = bit_identical(drafting)
            assert rate(composed) > WELL and rate(ordinary) > WELL, (composed, ordinary)
            for ask in leading:
                # Its record is exact, and what a head has read of it, too.
                assert watched(drafting, ask)[1] == watched(drafting, ask.plain())[1]
            check_crowd(drafting, crowd(), together)
            drafting.check_clean()
            drafting.reset()
            drafting.call(read_no_records)
            blind = [watched(drafting, ask)[1] for ask in free()]
            assert rate(blind) < WELL / 2, blind


@pytest.mark.slow
def test_beside_a_gated_delta_net(start_engine: EngineFactory, saved: Saver, tmp_path: Path) -> None:
    """Two layers for Qwen3.5, of which stock code runs the rows: in bfloat16 answers are those without drafts
    until two tokens are as good as each other."""
    draft = tmp_path / "draft"
    model = saved(save_qwen, draft)
    asked = [given for ask in free() for given in (ask, ask.plain())]
    answers = start_engine(model, **IN_BFLOAT16).ask_and_close(*asked)
    drafting = start_engine(model, speculative_config=by_model(draft), mended=poison_cache, **IN_BFLOAT16)
    assert 2 * sum(map(alike, drafting.ask_one_by_one(*asked), answers)) > len(answers)
    drafting.reset()
    composed, ordinary = bit_identical(drafting)
    assert rate(composed) > FAIRLY and rate(ordinary) > FAIRLY, (composed, ordinary)
    drafting.reset()
    drafting.call(read_no_records)
    assert rate([watched(drafting, ask)[1] for ask in free()]) < FAIRLY / 2


def test_a_draft_model_has_blocks_of_its_own(
    start_engine: EngineFactory, falcon: Falcon, tmp_path: Path
) -> None:
    """Its layer is in another group of vLLM's cache than the model's.  With the blocks of that, which stock
    vLLM gives it, answers are others."""
    save_another(falcon.draft, tmp_path / "another")
    asked = [given for ask in free() for given in (ask, ask.plain())]
    expected = start_engine(falcon.model, **IN_FLOAT32).ask_and_close(*asked)
    drafts = {"speculative_config": by_model(tmp_path / "another")}
    answers = start_engine(falcon.model, mended=poison_cache, **drafts, **IN_FLOAT32).ask_and_close(*asked)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    narrow = IN_FLOAT32 | {"enable_prefix_caching": True, "max_num_batched_tokens": 128}
    why = r"\(128 tokens\) and the slots that vLLM reserves .*expected 129 or more"
    with pytest.raises(EngineError, match=why) as refused:
        start_engine(falcon.model, **drafts, **narrow)
    assert refused.value.kind == "ConfigError"


@pytest.mark.slow
def test_a_head_behind_a_prefix_that_others_go_on_from(start_engine: EngineFactory, falcon: Falcon) -> None:
    """What others' records have read of the token behind a page, where prompts part, is not read here."""
    page, pages = 16, 5
    common, *rest = random_segments([pages * page, *[20] * 12], vocab=480, seed=3)
    asked = [Ask((*common, *own), ANSWER) for own in rest]
    args = IN_FLOAT32 | {"options": {"prefix": "sparse", "page_tokens": page}}
    with start_engine(falcon.model, speculative_config=by_head(falcon.head), **args) as drafting:
        after_others = [watched(drafting, ask) for ask in asked]
        for ask, (answer, drafted) in zip(asked, after_others, strict=True):
            drafting.reset()
            alone, of_alone = watched(drafting, ask)
            assert alone.tokens == answer.tokens and of_alone == drafted and alone.cached == 0
    assert max(answer.cached for answer, _ in after_others) == (pages - 1) * page
