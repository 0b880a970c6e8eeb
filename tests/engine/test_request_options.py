"""Options of requests that look at prompts, words or adapters, of sampling, and prompt logprobs: with
segments as without.

K and V of a model of one attention layer depend on a token alone, so composing is exact.  Repetition
penalties count the whole prompt, of which records hold a part, frequency and presence what was generated.
Prompt logprobs are given of tokens behind a computed one, others are null.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.oracle import random_segments
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

from .conftest import NEW, OLD, EngineFactory
from .engines import PAD, PDEP, SEP, Answer, Ask, Engine, distance, largest_distance, outputs_of, prompt, same
from .test_adapters import Adapter, answers
from .test_exactness import ranged

THINK, THOUGHT = 10, 11
"""Words between which the model reasons."""
LEAD, FIRST, SECOND, QUERY = (
    [12 if token in (THINK, THOUGHT) else token for token in segment]
    for segment in random_segments([40, 150, 70, 21], vocab=480)
)
FULL = {"hypic_link": "full"}


def ask(
    first: list[int] = FIRST, second: list[int] = SECOND, query: list[int] = QUERY, **sampling: Any
) -> Ask:
    extra = sampling.pop("extra", {})
    shown = {"logprobs": 3, "detokenize": True, **sampling}
    return Ask(prompt(first, second, lead=LEAD, query=query), max_tokens=12, extra=extra, sampling=shown)


@pytest.fixture(scope="module")
def engine(module_engine: EngineFactory, one_layer_model: Path) -> Engine:
    args = {"reasoning_parser": "words", "enable_lora": True, "max_loras": 2}
    args["logits_processors"] = [f"{__name__}:FavouredWords"]
    return module_engine(one_layer_model, dtype="float32", mended=register_parser, **args)


def register_parser() -> None:
    """Make a reasoning parser of these models' words known."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    class Words(BaseThinkingReasoningParser):
        start_token, end_token = f"w{THINK}", f"w{THOUGHT}"

    ReasoningParserManager.register_module("words", force=True, module=Words)


FAVOUR = "favour"


class FavouredWords(AdapterLogitsProcessor):
    """Adds the extra argument ``favour`` to a token's logit each time that it stands in the prompt, and takes
    it off where the answer has it already."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        favour = (params.extra_args or {}).get(FAVOUR)
        if favour is None:
            return None

        def change(prompt: list[int], answered: list[int], logits: torch.Tensor) -> torch.Tensor:
            for tokens, sign in ((prompt, 1), (answered, -1)):
                counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=len(logits))
                logits += sign * favour * counts
            return logits

        return change


def as_ordinary(engine: Engine, asked: Ask) -> Answer:
    """The answer: that of the ordinary request and of ``full``, whoever computed the records."""
    plain = replace(asked, tokens=asked.plain().tokens)
    full = replace(asked, extra=asked.extra | FULL)
    cold, warm, without, computed = engine.ask_one_by_one(asked, asked, plain, full)
    assert warm.cached > 200 and same(computed, without) and same(cold, warm)
    assert warm.samples == without.samples and cold.reasons == warm.reasons == without.reasons
    return warm


def test_words_that_end_or_are_forbidden(engine: Engine) -> None:
    free = as_ordinary(engine, ask())
    word = f"w{free.tokens[4]}"
    stopped = as_ordinary(engine, ask(stop=[word]))
    assert stopped.tokens == free.tokens[: len(stopped.tokens)] and stopped.reasons == ("stop",)
    assert free.tokens[4] not in as_ordinary(engine, ask(bad_words=[word])).tokens
    pair = f"w{free.tokens[3]} {word}"
    assert as_ordinary(engine, ask(bad_words=[pair])).tokens[:4] == free.tokens[:4]


def test_a_processor_of_ones_own_sees_the_whole_prompt(engine: Engine) -> None:
    """Beside others, too, and with the answers' tokens."""
    free, ours = as_ordinary(engine, ask()), ask(extra={FAVOUR: 3.0})
    favoured = as_ordinary(engine, ours)
    assert favoured.tokens != free.tokens
    together = engine.ask(ask(), ours, ask(SECOND, FIRST, extra={FAVOUR: 1.0}), ours.plain(), ours)
    assert together[1].tokens == together[4].tokens == favoured.tokens


def structured(**kind: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**kind)}


def within(segment: list[int], at: int, *words: int) -> list[int]:
    return [*segment[:at], *words, *segment[at + len(words) :]]


CHOICES = ["w401", "w402"]
REASONING = {
    "ended-in-a-record": (within(FIRST, 60, THINK, THOUGHT), QUERY, False),
    "begun-in-a-record": (within(FIRST, 60, THINK), QUERY, True),
    "ended-in-the-query": (within(FIRST, 60, THINK), within(QUERY, 3, THOUGHT), False),
    "begun-in-the-query": (within(FIRST, 60, THOUGHT), within(QUERY, 3, THINK), True),
    "ended-in-a-seam-begun-in-a-record": (within(within(FIRST, 1, THOUGHT), 60, THINK), QUERY, True),
}


@pytest.mark.parametrize("case", REASONING)
def test_grammars_begin_behind_reasoning(engine: Engine, case: str) -> None:
    """A word of a segment counts as in an ordinary prompt, whether it is in the stream or in a record."""
    first, query, reasons = REASONING[case]
    answer = as_ordinary(engine, ask(first, query=query, **structured(choice=CHOICES)))
    assert (answer.tokens[0] not in (401, 402)) == reasons


@pytest.mark.parametrize(("end", "forced"), [((), True), ((THOUGHT,), False)], ids=["open", "closed"])
def test_a_budget_of_reasoning_counts_what_a_record_holds(
    engine: Engine, end: tuple[int, ...], forced: bool
) -> None:
    answer = as_ordinary(engine, ask(within(FIRST, 60, THINK, *end), thinking_token_budget=5))
    assert (answer.tokens[0] == THOUGHT) == forced


@pytest.mark.parametrize("kind", [{"choice": CHOICES}, {"regex": r"w4\d\d"}], ids=["choice", "regex"])
def test_grammars(engine: Engine, kind: dict[str, Any]) -> None:
    answer = as_ordinary(engine, ask(query=[THOUGHT, *QUERY], ignore_eos=False, **structured(**kind)))
    assert 400 <= answer.tokens[0] < 480 and len(answer.tokens) == 2


def test_adapters_have_records_of_their_own(engine: Engine, kinds: Path) -> None:
    engine.reset()
    asked = ask()
    base = as_ordinary(engine, asked)
    found = {}
    for name in (OLD, NEW):
        adapter = Adapter(str(kinds / name), name=name)
        cold, warm, plain = engine.call(answers, adapter, asked, asked, asked.plain())
        assert cold.cached == 0 and warm.cached > 200
        assert cold.logprobs == warm.logprobs
        assert cold.tokens == plain.tokens
        found[name] = cold.tokens
    assert len({base.tokens, *found.values()}) == 3
    assert as_ordinary(engine, asked).tokens == base.tokens


BOUND = 1e-4
"""Measured: 1e-5; where the tokens of records are not counted, others are generated."""
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
}


def sampled(*segments: list[int], **sampling: Any) -> Ask:
    return Ask(prompt(*segments, lead=LEAD, query=QUERY), 12, sampling={"logprobs": -1, **sampling})


@pytest.fixture(scope="module")
def penalising(module_engine: EngineFactory, one_layer_model: Path) -> Engine:
    shown = {"max_logprobs": -1, "logprobs_mode": "processed_logprobs"}
    return module_engine(one_layer_model, dtype="float32", **shown)


DRAWN = {"temperature": 0.9, "seed": 7}
ASKED: dict[str, dict[str, Any]] = {
    "drawn": DRAWN,
    "top-k-top-p": DRAWN | {"top_k": 40, "top_p": 0.8},
    "min-p": DRAWN | {"min_p": 0.05},
    "several": DRAWN | {"n": 3},
    "logit-bias": {"logit_bias": {QUERY[0]: 6.0, QUERY[1]: -100.0}},
    "allowed-tokens": {"allowed_token_ids": [*FIRST[:5], *SECOND[:5]]},
    "stop-tokens": {"stop_token_ids": FIRST + SECOND},
    "least-tokens": {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": FIRST + SECOND},
    "penalties-drawn": DRAWN | PENALTIES["all"],
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_the_ordinary_request(penalising: Engine, name: str) -> None:
    asked = sampled(FIRST, SECOND, **ASKED[name])
    ours, plain, free = penalising.ask_one_by_one(asked, asked.plain(), sampled(FIRST, SECOND))
    (warm,) = penalising.ask(asked)
    assert ours.samples == warm.samples == plain.samples
    assert ours.reasons == warm.reasons == plain.reasons
    assert ours.samples != free.samples, "it changes nothing"


def test_beam_search(penalising: Engine) -> None:
    composed = sampled(FIRST, SECOND)
    ours, plain = (penalising.call(beams, one.tokens) for one in (composed, composed.plain()))
    assert ours == plain and len(set(ours)) == len(ours) == 3


def beams(llm: Any, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What the best beams say behind the prompt ``tokens``."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (found,) = llm.beam_search([{"prompt_token_ids": list(tokens)}], params)
    return [tuple(one.tokens[len(tokens) :]) for one in found.sequences]


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_the_ordinary_request(penalising: Engine, name: str) -> None:
    composed = sampled(FIRST, SECOND, **PENALTIES[name])
    ours, plain, free = penalising.ask_one_by_one(composed, composed.plain(), sampled(FIRST, SECOND))
    (warm,) = penalising.ask(composed)
    assert warm.cached > 200
    for one in (ours, warm):
        assert one.tokens == plain.tokens != free.tokens
        for a, b in zip(one.logprobs[0], plain.logprobs[0], strict=True):
            assert max(abs(a[t] - b[t]) for t in a.keys() & b.keys()) <= BOUND


def test_a_token_that_only_a_record_holds_is_penalised(penalising: Engine) -> None:
    """By as much as one of the query: logits above zero are divided, others multiplied."""
    only = next(t for t in SECOND[20:-20] if t not in {*LEAD, *FIRST, *QUERY, *SECOND[:20], *SECOND[-20:]})
    others = [t for t in SECOND if t != only]
    asked = sampled(FIRST, SECOND), *(sampled(FIRST, s, **PENALTIES["repetition"]) for s in (SECOND, others))
    free, penalised, without = penalising.ask_one_by_one(*asked)
    assert distance(free, penalised) > 1
    assert abs(without.first[only] - penalised.first[only]) > 0.1


def test_requests_of_a_batch_have_their_own(penalising: Engine) -> None:
    """Composed and ordinary requests, with penalties and without, which begin and end beside each other."""
    asks = [
        replace(sampled(FIRST, SECOND), max_tokens=3),
        sampled(SECOND, FIRST, **PENALTIES["all"]),
        replace(sampled(FIRST, **PENALTIES["repetition"]).plain(), max_tokens=5),
        replace(sampled(SECOND, **PENALTIES["repetition"]), max_tokens=9),
        replace(sampled(SECOND).plain(), max_tokens=7),
    ]
    together, alone = penalising.ask(*asks), penalising.ask_one_by_one(*asks)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert largest_distance(together, alone) <= BOUND


PROMPT = prompt(FIRST, SECOND, lead=LEAD, query=QUERY)
SEAM = 8
LINK = {"hypic_link": f"seam-{SEAM}-{SEAM}"}

Scored = list[dict[int, float] | None]


def scored(llm: Any, *asks: Ask) -> list[Scored]:
    """Prompt logprobs by token, of requests that run together."""
    outputs = outputs_of(llm, *asks)
    for ask, output in zip(asks, outputs, strict=True):
        assert len(output.prompt_logprobs) == len(ask.tokens)
    # Flat ones have an empty mapping for nothing.
    return [
        [{t: one.logprob for t, one in entry.items()} if entry else None for entry in output.prompt_logprobs]
        for output in outputs
    ]


def to_score(tokens: tuple[int, ...] = PROMPT, most: int = 3, **extra: Any) -> Ask:
    return Ask(tokens, 1, extra, sampling={"prompt_logprobs": most})


def given(found: Scored) -> list[int]:
    return [i for i, entry in enumerate(found) if entry is not None]


def runs(*bounds: tuple[int, int]) -> list[int]:
    return [i for first, stop in bounds for i in range(first, stop)]


BEGIN = len(LEAD) + 1
BETWEEN = BEGIN + len(FIRST) + 1
END = BETWEEN + len(SECOND) + 1
COMPUTED = runs(
    (BEGIN + 1, BEGIN + SEAM),
    (BETWEEN - SEAM, BETWEEN - 1),
    (BETWEEN, BETWEEN + SEAM),
    (END - SEAM, END - 1),
    (END, END + len(QUERY)),
)
"""Indices of the prompt's tokens whose predecessor is in the stream, with windows of :data:`SEAM` tokens."""


@pytest.fixture(scope="module")
def exact(module_engine: EngineFactory, one_layer_model: Path) -> Engine:
    args = {"max_logprobs": -1, "max_num_batched_tokens": 32}
    return module_engine(one_layer_model, dtype="float32", **args)


@pytest.mark.parametrize("flat", [False, True], ids=["dicts", "flat"])
def test_what_is_given_is_what_the_ordinary_request_gets(exact: Engine, flat: bool) -> None:
    """In prefill chunks of 32 tokens."""
    asked = to_score(most=-1, **LINK)
    asked.sampling["flat_logprobs"] = flat
    cold, warm, plain = (exact.call(scored, one)[0] for one in (asked, asked, asked.plain()))
    assert cold == warm and given(cold) == COMPUTED
    logical = [i for i, token in enumerate(PROMPT) if token != SEP]
    for i in COMPUTED:
        entry, other = cold[i], plain[logical.index(i)]
        assert entry and other and entry.keys() == other.keys() and PROMPT[i] in entry
        assert max(abs(entry[t] - other[t]) for t in entry) < 1e-4


def test_full_gives_all_that_the_ordinary_request_gets(hypic: Engine, stock: Engine) -> None:
    ours = hypic.call(scored, to_score(**FULL))[0]
    assert given(ours) == [i for i, token in enumerate(PROMPT) if i and token != SEP]
    assert [ours[0], *(ours[i] for i in given(ours))] == stock.call(scored, to_score().plain())[0]


@pytest.mark.parametrize(
    "extra", [LINK, LINK | {"hypic_islands": "query-20"}, {"hypic_link": "epic-0"}], ids=str
)
def test_cold_is_warm(hypic: Engine, extra: dict[str, Any]) -> None:
    """Records of this request, or of another; beside others, and alone."""
    asked, other = to_score(**extra), to_score(prompt(SECOND, lead=LEAD, query=FIRST[:30]), **extra)
    cold = hypic.call(scored, asked)[0]
    assert hypic.call(scored, asked, asked) == [cold, cold]
    together = hypic.call(scored, asked, other, asked.plain())
    alone = given(cold), given(hypic.call(scored, other)[0])
    assert [*map(given, together)] == [*alone, [*range(1, len(asked.plain().tokens))]]
    if "hypic_islands" in extra:
        assert set(COMPUTED) < set(given(cold)), "no island"


def test_padding_and_dependent_tokens(exact: Engine) -> None:
    """What follows padding has no predecessor; tokens behind PDep have, though no record holds them."""
    tokens = (*LEAD, SEP, *FIRST, PDEP, *SECOND[:12], SEP, *QUERY, PAD, *QUERY[:3])
    found = exact.call(scored, to_score(tokens, **LINK))[0]
    dependent = BEGIN + len(FIRST) + 1
    query = dependent + 13
    assert given(found) == runs(
        (BEGIN + 1, BEGIN + SEAM),
        (dependent - SEAM, dependent - 1),
        (dependent, dependent + 12),
        (query, query + len(QUERY)),
        (query + len(QUERY) + 2, query + len(QUERY) + 4),
    )


def test_named_segments(exact: Engine) -> None:
    """The same segments, named in a prompt without separators."""
    parted = ranged(FIRST, SECOND, lead=LEAD, query=QUERY)
    named = to_score(parted.tokens, **parted.extra, **LINK)
    marked = exact.call(scored, to_score(**LINK))[0]
    logical = [entry for token, entry in zip(PROMPT, marked, strict=True) if token != SEP]
    assert exact.call(scored, named)[0] == logical


def test_a_prompt_that_only_warms_its_segments_has_nulls(exact: Engine) -> None:
    assert given(exact.call(scored, to_score((*LEAD, SEP, *FIRST, SEP), **LINK))[0]) == []


def test_preempted_requests(tight: Engine) -> None:
    """More requests than the KV cache holds, in chunks: each is given what it is given alone."""
    # Streams that need one more block of 256 while they decode.
    queries = random_segments([2 * 256 - 4 * SEAM - 1 - i % 7 for i in range(12)], vocab=480)
    prompts = (prompt(FIRST, SECOND, lead=LEAD, query=query) for query in queries)
    asks = [replace(to_score(tokens, **LINK), max_tokens=12) for tokens in prompts]
    alone = [given(tight.call(scored, one)[0]) for one in asks]
    before = tight.metrics()["vllm:num_preemptions"]
    assert [given(found) for found in tight.call(scored, *asks)] == alone
    assert tight.metrics()["vllm:num_preemptions"] > before
