"""Speculative decoding: drafts change no answer, and are those of the whole prompt, records or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib.oracle import random_segments

from .conftest import EngineFactory, Saver, lent
from .engines import LAST_WORD, SEP, Answer, Ask, Engine, answer_of, begin, prompt, same, scheduler_of
from .tiny_drafters import save_near, save_with_head, save_with_head3

DRAFTS, LOOKUP = 3, (1, 3)
"""Tokens that are drafted at most; shortest and longest n-gram."""
NGRAMS = {"method": "ngram", "num_speculative_tokens": DRAFTS}
NGRAMS |= {"prompt_lookup_min": LOOKUP[0], "prompt_lookup_max": LOOKUP[1]}
MAX_MODEL_LEN = 1024
# Exact enough that a draft's logits are those of a token that decodes alone; chunks, and few blocks.
ARGS: dict[str, Any] = {
    **{"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": 10},
    **{"max_num_batched_tokens": 256, "max_num_seqs": 8},
    **{"enable_prefix_caching": False, "disable_log_stats": False},
}
ANSWER, WORDS = 48, 4


def by_model(path: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": DRAFTS}


def by_head(path: Path, method: str = "eagle") -> dict[str, Any]:
    return by_model(path) | {"method": method}


@dataclass(frozen=True)
class Drafted:
    """Steps that had drafts, tokens drafted in them, and those of them that were accepted."""

    steps: int
    tokens: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.tokens


@pytest.fixture(scope="module")
def _drafting(module_engine: EngineFactory, attention_model: Path) -> Engine:
    return module_engine(attention_model, speculative_config=NGRAMS, **ARGS)


@pytest.fixture(scope="module")
def _plain(module_engine: EngineFactory, attention_model: Path) -> Engine:
    return module_engine(attention_model, **ARGS)


@pytest.fixture(scope="module")
def _stock(module_engine: EngineFactory, attention_model: Path) -> Engine:
    return stock_engine(module_engine, attention_model, NGRAMS)


def stock_engine(start: EngineFactory, model: Path, drafts: dict[str, Any], **args: Any) -> Engine:
    # Numba keeps to the threads of the test's engines where the plugin does not see to it.
    env = {"NUMBA_NUM_THREADS": "1"}
    return start(model, hypic=False, speculative_config=drafts, env=env, **(ARGS | args))


drafting = lent("_drafting")
plain = lent("_plain")
"""The same engine without speculative decoding."""


def asks(seed: int = 0, max_tokens: int = ANSWER) -> list[Ask]:
    """Their answers are of few words, which repeat each other and the prompt; the model itself is random."""
    lead, a, b, c, query = random_segments([50, 140, 310, 77, 19], vocab=480, seed=seed)
    words = {"allowed_token_ids": [*b[: WORDS // 2], *range(LAST_WORD - WORDS // 2, LAST_WORD)]}
    return [
        Ask(prompt(a, b, c, lead=lead, query=query), max_tokens, sampling=words),
        Ask(prompt(c, b, query=query[:1]), max_tokens, {"hypic_link": "epic-0"}, sampling=words),
        Ask(prompt(b, b, lead=lead, query=query), max_tokens, {"hypic_link": "seam-4-4"}, sampling=words),
    ]


def by_full(ask: Ask) -> Ask:
    return replace(ask, extra={"hypic_link": "full"})


def counts(engine: Engine) -> list[int]:
    """What :class:`Drafted` counts, since the engine began."""
    found, names = engine.metrics(), ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [int(found.get(f"vllm:spec_decode_{name}", 0)) for name in names]


def watched_together(engine: Engine, *asks: Ask) -> tuple[list[Answer], Drafted]:
    """Answers of requests that run together, and what was drafted of them."""
    before = counts(engine)
    answers = engine.ask(*asks)
    return answers, Drafted(*(b - a for a, b in zip(before, counts(engine), strict=True)))


def watched(engine: Engine, ask: Ask) -> tuple[Answer, Drafted]:
    """An answer, and what was drafted of it."""
    [answer], drafted = watched_together(engine, ask)
    return answer, drafted


Watched = tuple[Answer, Drafted]


def equal(one: Watched, other: Watched) -> bool:
    """Whether answers and drafts are the same, bit for bit."""
    return same(one[0], other[0]) and one[1] == other[1]


def cold_as_warm(drafting: Engine, ask: Ask) -> Watched:
    """A cold answer and its drafts; the warm ones are equal."""
    cold, warm = watched(drafting, ask), watched(drafting, ask)
    assert equal(cold, warm) and warm[0].cached > cold[0].cached
    return cold


def plain_as_full(drafting: Engine, ask: Ask) -> Watched:
    """The answer to the prompt without separators, and its drafts; those of link ``full`` are equal."""
    plain, full = watched(drafting, ask.plain()), watched(drafting, by_full(ask))
    assert equal(plain, full)
    return plain


def check_crowd(drafting: Engine, crowd: Sequence[Ask], expected: Sequence[Answer]) -> Drafted:
    """Requests that run together preempt each other, and have the expected answers; returns their drafts."""
    preempted = "vllm:num_preemptions"
    before = drafting.metrics()[preempted]
    answers, drafted = watched_together(drafting, *crowd)
    assert [a.samples for a in answers] == [a.samples for a in expected]
    assert drafting.metrics()[preempted] > before, "there was room for all: nothing is shown"
    return drafted


Proposer = Callable[[Sequence[int]], Sequence[int]]
"""From a prompt and what was generated to what is drafted behind it."""


def ngrams(tokens: Sequence[int]) -> Sequence[int]:
    """What vLLM's proposer finds."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find

    return find(np.array(tokens, dtype=np.int32), *LOOKUP, MAX_MODEL_LEN, DRAFTS).tolist()


def suffixes_of(known: Sequence[int]) -> Proposer:
    """What the cache of vLLM's proposer finds behind the prompt ``known``, by vLLM's ordinary settings."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=0)
    cache.start_request("request", np.array(known, dtype=np.int32))
    told = len(known)

    def find(tokens: Sequence[int]) -> Sequence[int]:
        nonlocal told
        cache.add_active_response("request", tokens[told:])
        told = len(tokens)
        pattern = np.array(tokens[-24:], dtype=np.int32)
        options = {"max_spec_tokens": DRAFTS, "max_spec_factor": 1.0, "min_token_prob": 0.1}
        return cache.speculate("request", pattern, **options).token_ids

    return find


def looked_up(known: Sequence[int], answer: Sequence[int], length: int, find: Proposer = ngrams) -> Drafted:
    """What is drafted of the first ``length`` tokens of an answer behind the tokens ``known``."""
    steps = tokens = accepted = 0
    done = 1
    while done < length:
        draft = find([*known, *answer[:done]])
        right = next((i for i, t in enumerate(draft) if t != answer[done + i]), len(draft))
        steps, tokens, accepted = steps + bool(draft), tokens + len(draft), accepted + right
        done += right + 1
    return Drafted(steps, tokens, accepted)


def test_answers_are_those_without_drafts(drafting: Engine, plain: Engine) -> None:
    for ask in asks():
        [expected] = plain.ask(ask)
        answer, drafted = cold_as_warm(drafting, ask)
        assert answer.tokens == expected.tokens
        assert drafted.accepted > 0, "no draft was right: nothing is shown"


def test_plain_requests_and_link_full_are_stock(drafting: Engine, stock: Engine) -> None:
    for ask in asks():
        assert equal(plain_as_full(drafting, ask), watched(stock, ask.plain()))


def test_drafts_are_looked_up_in_the_whole_prompt(drafting: Engine, plain: Engine) -> None:
    for ask in asks():
        [longer] = plain.ask(replace(ask, max_tokens=ANSWER + DRAFTS))
        answer, drafted = watched(drafting, ask)
        assert answer.tokens == longer.tokens[:ANSWER]
        assert drafted == looked_up(ask.plain().tokens, longer.tokens, ANSWER)
        # What its stream has, at least: all that follows the last separator.
        query = ask.tokens[len(ask.tokens) - ask.tokens[::-1].index(SEP) :]
        assert drafted != looked_up(query, longer.tokens, ANSWER)


def test_requests_side_by_side_are_preempted_and_end_alike(drafting: Engine, plain: Engine) -> None:
    check_crowd(drafting, crowd(asks), plain.ask_one_by_one(*crowd(asks)))


def longest_row(llm: Any) -> None:
    """Have the model runner fail where a position is beyond the model's."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    stock = runner._rewrite_positions

    def checked(step: Any) -> None:
        stock(step)
        ends = [c.stream.plan.logical(c.row.s1 - 1, c.row.s1)[0] for c in step.composed]
        assert all(end < MAX_MODEL_LEN for end in ends), ends

    runner._rewrite_positions = checked


def test_answers_may_reach_the_models_length(drafting: Engine, plain: Engine) -> None:
    drafting.call(longest_row)
    check_longest(drafting, plain, asks()[0])


def check_longest(drafting: Engine, plain: Engine, ask: Ask) -> None:
    room = MAX_MODEL_LEN - len(ask.plain().tokens)
    [expected], [answer] = (one.ask(replace(ask, max_tokens=room + 64)) for one in (plain, drafting))
    assert len(answer.tokens) == room and answer.tokens == expected.tokens


def test_penalties_count_the_whole_prompt(drafting: Engine, plain: Engine) -> None:
    changed = 0
    for ask in asks():
        penalised = replace(ask, sampling=ask.sampling | {"repetition_penalty": 2.0})
        [expected], [answer] = plain.ask(penalised), drafting.ask(penalised)
        assert answer.tokens == expected.tokens
        changed += answer.tokens != plain.ask(ask)[0].tokens
    assert changed, "the penalty changes nothing: nothing is shown"


@pytest.mark.fast("0")
@pytest.mark.parametrize("number", range(3))
def test_samples_are_those_without_drafts(drafting: Engine, plain: Engine, number: int) -> None:
    """Two samples by ``top_k=1``, where stock vLLM ends the engine (``patches/cpu_draft_sampling.py``), are
    greedy.  Two drawn at a temperature differ, and are the same warm as cold, and without separators as by
    link ``full``."""
    ask, drawn = asks()[number], []
    for asked in (ask, ask.plain(), by_full(ask)):
        [expected] = plain.ask(asked)
        two = asked.sampling | {"n": 2, "temperature": 0.8}
        certain, drafted = watched(drafting, replace(asked, sampling=two | {"top_k": 1}))
        assert certain.samples == (expected.tokens,) * 2 and drafted.accepted > 0
        drawn.append(replace(asked, sampling=two | {"seed": 5}))
    drafting.reset()
    cold, warm, ordinary, full = (watched(drafting, asked) for asked in (drawn[0], *drawn))
    assert len(set(cold[0].samples)) == len(set(ordinary[0].samples)) == 2
    for one, other in ((cold, warm), (ordinary, full)):
        assert one[0].samples == other[0].samples and one[1] == other[1] and one[1].accepted > 0


def test_segment_requests_have_no_drafts(drafting: Engine) -> None:
    """One of a single token, beside a request that runs, is what vLLM pads with drafts."""
    [ask, *_] = asks()
    long, short = replace(ask, max_tokens=200), Ask(prompt([7], [9], query=ask.tokens[-5:]), 8)
    expected = drafting.ask_one_by_one(long, short)
    drafting.reset()
    assert [a.tokens for a in drafting.call(ask_later, long, short)] == [a.tokens for a in expected]


def ask_later(llm: Any, first: Ask, second: Ask) -> list[Answer]:
    """The second request comes when the first decodes."""
    outputs: dict[str, Any] = {}
    begin(llm, "first", first)
    while scheduler_of(llm).get_num_unfinished_requests():
        late = not outputs
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        if late and outputs:
            begin(llm, "second", second)
    return [answer_of(outputs["first"]), answer_of(outputs["second"])]


@pytest.mark.slow
def test_suffixes_are_those_of_the_whole_prompt(start_engine: EngineFactory, attention_model: Path) -> None:
    """With ``arctic-inference``, of which its suffix tree alone is used."""
    pytest.importorskip("arctic_inference.suffix_decoding")
    # No request's drafts are those of an earlier one's answer.
    drafts = {"method": "suffix", "num_speculative_tokens": DRAFTS, "suffix_decoding_max_cached_requests": 0}
    longer = (replace(ask, max_tokens=ANSWER + DRAFTS) for ask in asks())
    answers = start_engine(attention_model, **ARGS).ask_and_close(*longer)
    with stock_engine(start_engine, attention_model, drafts) as stock:
        expected = [watched(stock, ask.plain()) for ask in asks()]
    with start_engine(attention_model, speculative_config=drafts, **ARGS) as drafting:
        for ask, wanted, of_stock in zip(asks(), answers, expected, strict=True):
            assert equal(plain_as_full(drafting, ask), of_stock)
            answer, drafted = cold_as_warm(drafting, ask)
            assert answer.tokens == wanted.tokens[:ANSWER]
            whole = ask.plain().tokens
            assert drafted == looked_up(whole, wanted.tokens, ANSWER, suffixes_of(whole))
            assert drafted.accepted > 0


# -- drafts of a model


@pytest.fixture(scope="module")
def _own(module_engine: EngineFactory, attention_model: Path) -> Engine:
    return module_engine(attention_model, speculative_config=by_model(attention_model), **ARGS)


own = lent("_own")
"""An engine whose model drafts for itself: in float32 it is always right, if it sees what it sees."""


def free(seed: int = 0, max_tokens: int = ANSWER) -> list[Ask]:
    """The same prompts with answers of any words."""
    return [replace(ask, sampling={}) for ask in asks(seed, max_tokens)]


def test_a_model_that_drafts_for_itself_is_always_right(own: Engine, plain: Engine) -> None:
    for ask in free():
        expected = plain.ask_one_by_one(ask, ask.plain())
        found = cold_as_warm(own, ask), watched(own, ask.plain())
        for (answer, drafted), wanted in zip(found, expected, strict=True):
            assert answer.tokens == wanted.tokens
            # The pass that decodes one token more than was drafted has it for nothing.
            assert drafted.accepted == drafted.tokens >= ANSWER * DRAFTS // (DRAFTS + 1) - DRAFTS


def crowd(of: Callable[[int, int], list[Ask]] = free) -> list[Ask]:
    """Composed and ordinary requests, which preempt each other."""
    return [*of(1, 160), *(ask.plain() for ask in of(2, 160))]


@pytest.mark.slow
def test_drafts_of_a_model_side_by_side(own: Engine, plain: Engine) -> None:
    drafted = check_crowd(own, crowd(), plain.ask_one_by_one(*crowd()))
    assert drafted.accepted == drafted.tokens


def test_what_drafts_reaches_the_models_length(own: Engine, plain: Engine) -> None:
    check_longest(own, plain, free()[0])


@pytest.mark.slow
def test_drafts_of_another_model(
    start_engine: EngineFactory, plain: Engine, attention_model: Path, tmp_path: Path
) -> None:
    drafts = by_model(save_near(attention_model, tmp_path / "near"))
    stock = stock_engine(start_engine, attention_model, drafts)
    expected = [watched(stock, ask.plain()) for ask in free()]
    assert all(0 < drafted.accepted < drafted.tokens for _, drafted in expected), expected
    stock.close()
    drafting = start_engine(attention_model, speculative_config=drafts, **ARGS)
    rates = []
    for ask, of_stock in zip(free(), expected, strict=True):
        assert equal(plain_as_full(drafting, ask), of_stock)
        composed, of_composed = watched(drafting, ask)
        assert composed.tokens == plain.ask(ask)[0].tokens
        rates.append((of_composed.rate, of_stock[1].rate))
    assert abs(np.subtract(*np.transpose(rates)).mean()) < 0.15, rates


@pytest.mark.slow
@pytest.mark.parametrize(("method", "save"), [("eagle", save_with_head), ("eagle3", save_with_head3)])
def test_drafts_of_a_head_on_hidden_states(
    start_engine: EngineFactory, tmp_path: Path, method: str, save: Callable[..., None], saved: Saver
) -> None:
    """With seams composed requests draft what ordinary ones do, token for token: here composing is exact."""
    model = saved(save, tmp_path / "head")
    drafts = by_head(tmp_path / "head", method)
    # At the end of a chunk vLLM has the head read the prompt's last token for its next one.
    whole = {"max_num_batched_tokens": MAX_MODEL_LEN}
    with stock_engine(start_engine, model, drafts, **whole) as stock:
        expected = [watched(stock, ask.plain()) for ask in free()]
    with start_engine(model, **ARGS) as plain:
        answers = plain.ask_one_by_one(*free())
        together = plain.ask_one_by_one(*crowd())
        query = free()[0].tokens[-19:]
        assert plain.ask(Ask(query, ANSWER))[0].tokens != answers[0].tokens, "answers are the query's alone"
    rates = []
    with start_engine(model, speculative_config=drafts, **(ARGS | whole)) as drafting:
        for ask, answer, of_stock in zip(free(), answers, expected, strict=True):
            assert equal(plain_as_full(drafting, ask), of_stock)
            cold, of_composed = cold_as_warm(drafting, ask)
            assert cold.tokens == answer.tokens
            rates.append((of_composed.rate, of_stock[1].rate))
            # Behind a record without a seam stands another token in each prompt.
            assert of_composed == of_stock[1] or ask.extra.get("hypic_link") == "epic-0", rates
    assert all(rate > 0.2 for of_both in rates for rate in of_both), rates
    with start_engine(model, speculative_config=drafts, **ARGS) as drafting:
        for ask, rate in zip(free(), rates, strict=True):
            assert watched(drafting, ask)[1].rate == rate[0]
        check_crowd(drafting, crowd(), together)
