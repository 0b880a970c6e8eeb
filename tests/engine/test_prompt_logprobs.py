"""Prompt logprobs of requests with segments: those of tokens behind a computed one are given, others null."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import random_segments

from . import tiny_models
from .conftest import EngineFactory
from .engines import PAD, PDEP, SEP, Ask, Engine, metrics, prompt, run_apart, sampling_params

LEAD, FIRST, SECOND, QUERY = random_segments([40, 150, 70, 21], vocab=480)
PROMPT = prompt(FIRST, SECOND, lead=LEAD, query=QUERY)
SEAM = 8
LINK = {"hypic_link": f"seam-{SEAM}-{SEAM}"}
FULL = {"hypic_link": "full"}

Scored = list[dict[int, float] | None]


def scored(llm: Any, *asks: Ask) -> list[Scored]:
    """Prompt logprobs by token, of requests that run together."""
    prompts = [{"prompt_token_ids": list(ask.tokens)} for ask in asks]
    outputs = llm.generate(prompts, [sampling_params(ask) for ask in asks], use_tqdm=False)
    for ask, output in zip(asks, outputs, strict=True):
        assert len(output.prompt_logprobs) == len(ask.tokens)
    # Flat ones have an empty mapping for nothing.
    return [
        [{t: one.logprob for t, one in entry.items()} if entry else None for entry in output.prompt_logprobs]
        for output in outputs
    ]


def ask(tokens: tuple[int, ...] = PROMPT, most: int = 3, **extra: Any) -> Ask:
    return Ask(tokens, max_tokens=1, extra=extra, sampling={"prompt_logprobs": most})


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
def exact(
    module_engine: EngineFactory, tmp_path_factory: pytest.TempPathFactory, engine_logs: Path
) -> Iterator[Engine]:
    """One attention layer, whose K and V depend on a token alone: composing is exact."""
    path = tmp_path_factory.mktemp("prompt-logprobs")
    run_apart(tiny_models.save, path, "Qwen3", {"num_hidden_layers": 1}, log=engine_logs / "models.log")
    with module_engine(path, dtype="float32", max_logprobs=-1, max_num_batched_tokens=32) as started:
        yield started


@pytest.mark.parametrize("flat", [False, True], ids=["dicts", "flat"])
def test_what_is_given_is_what_the_ordinary_request_gets(exact: Engine, flat: bool) -> None:
    """In prefill chunks of 32 tokens."""
    asked = ask(most=-1, **LINK)
    asked.sampling["flat_logprobs"] = flat
    cold, warm, plain = (exact.call(scored, one)[0] for one in (asked, asked, asked.plain()))
    assert cold == warm and given(cold) == COMPUTED
    logical = [i for i, token in enumerate(PROMPT) if token != SEP]
    for i in COMPUTED:
        entry, other = cold[i], plain[logical.index(i)]
        assert entry and other and entry.keys() == other.keys() and PROMPT[i] in entry
        assert max(abs(entry[t] - other[t]) for t in entry) < 1e-4


def test_full_gives_all_that_the_ordinary_request_gets(hypic: Engine, stock: Engine) -> None:
    ours = hypic.call(scored, ask(**FULL))[0]
    assert given(ours) == [i for i, token in enumerate(PROMPT) if i and token != SEP]
    assert [ours[0], *(ours[i] for i in given(ours))] == stock.call(scored, ask().plain())[0]


@pytest.mark.parametrize(
    "extra", [LINK, LINK | {"hypic_islands": "query-20"}, {"hypic_link": "epic-0"}], ids=str
)
def test_cold_is_warm(hypic: Engine, extra: dict[str, Any]) -> None:
    """Records of this request, or of another; beside others, and alone."""
    asked, other = ask(**extra), ask(prompt(SECOND, lead=LEAD, query=FIRST[:30]), **extra)
    cold = hypic.call(scored, asked)[0]
    assert hypic.call(scored, asked, asked) == [cold, cold]
    together = hypic.call(scored, asked, other, asked.plain())
    assert list(map(given, together)) == [
        given(cold),
        given(hypic.call(scored, other)[0]),
        list(range(1, len(asked.plain().tokens))),
    ]
    if "hypic_islands" in extra:
        assert set(COMPUTED) < set(given(cold)), "no island"


def test_padding_and_dependent_tokens(exact: Engine) -> None:
    """What follows padding has no predecessor; tokens behind PDep have, though no record holds them."""
    tokens = (*LEAD, SEP, *FIRST, PDEP, *SECOND[:12], SEP, *QUERY, PAD, *QUERY[:3])
    found = exact.call(scored, ask(tokens, **LINK))[0]
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
    bounds = [len(LEAD), len(LEAD) + len(FIRST), len(LEAD) + len(FIRST), len(LEAD) + len(FIRST + SECOND)]
    named = Ask(ask().plain().tokens, 1, LINK | {"hypic_segments": bounds}, sampling=ask().sampling)
    marked = exact.call(scored, ask(**LINK))[0]
    assert exact.call(scored, named)[0] == [
        entry for token, entry in zip(PROMPT, marked, strict=True) if token != SEP
    ]


def test_a_prompt_that_only_warms_its_segments_has_nulls(exact: Engine) -> None:
    assert given(exact.call(scored, ask((*LEAD, SEP, *FIRST, SEP), **LINK))[0]) == []


def test_preempted_requests(tight: Engine) -> None:
    """More requests than the KV cache holds, in chunks: each is given what it is given alone."""
    # Streams that need one more block of 256 while they decode.
    queries = random_segments([2 * 256 - 4 * SEAM - 1 - i % 7 for i in range(12)], vocab=480)
    asks = [
        replace(ask(prompt(FIRST, SECOND, lead=LEAD, query=query), **LINK), max_tokens=12)
        for query in queries
    ]
    alone = [given(tight.call(scored, one)[0]) for one in asks]
    before = tight.call(metrics)["vllm:num_preemptions"]
    assert [given(found) for found in tight.call(scored, *asks)] == alone
    assert tight.call(metrics)["vllm:num_preemptions"] > before
