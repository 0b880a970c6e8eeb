"""Later turns reuse the stream through vLLM's prefix cache; nothing crosses tenants or exactness."""

from typing import Any

from lib.oracle.models import random_segments

from .engines import Answer, Ask, Engine, distance, plan_of, prompt, same
from .test_contexts_and_islands import forget_streams
from .test_resets import resident

BLOCK = 256
"""Tokens in a block of vLLM's KV cache on these models; states are kept at block boundaries."""

LEAD, ONE, TWO, QUESTION, MORE = random_segments([90, 150, 200, 700, 60], seed=21)
RECORDED = len(LEAD) + len(ONE) - 16 + len(TWO) - 16
"""Tokens of the documents that come from records."""


def first_turn(**changes: Any) -> Ask:
    return Ask(prompt(ONE, TWO, query=QUESTION, lead=LEAD), **({"max_tokens": 24} | changes))


def second_turn(first: Answer) -> Ask:
    return Ask(prompt(ONE, TWO, query=[*QUESTION, *first.tokens, *MORE], lead=LEAD), 24)


def stream_of(llm: Any, ask: Ask) -> Ask:
    """The tokens that vLLM computes for a composed request."""
    return Ask(tuple(plan_of(llm, ask.tokens, salt=ask.salt).stream))


def stock_ignores_how_many_rows(hypic: Engine) -> bool:
    """Whether a plain prompt's last bits are the same if its first two blocks of three were cached: so it is
    with matrix kernels for AVX512, but not with those for AVX2."""
    (text,) = random_segments([900], seed=22)
    hypic.ask(Ask(tuple(text[:600])))
    (reused,) = hypic.ask(Ask(tuple(text)))
    hypic.call(forget_streams)
    (fresh,) = hypic.ask(Ask(tuple(text)))
    assert (reused.cached, fresh.cached) == (2 * BLOCK, 0)
    return same(reused, fresh)


def test_second_turn_reuses_the_stream_of_the_first(hypic: Engine) -> None:
    (first,) = hypic.ask(first_turn())
    (reused,) = hypic.ask(second_turn(first))
    hypic.call(forget_streams)
    (fresh,) = hypic.ask(second_turn(first))

    assert first.cached == 0
    assert fresh.cached == RECORDED
    # Whole blocks of turn 1's stream: seams, question, and the answer but for its last token.
    blocks = (4 * 8 + len(QUESTION) + 23) // BLOCK
    assert blocks == 2 and reused.cached == RECORDED + blocks * BLOCK, reused.cached

    # Fewer rows are computed together than without the cache: the last bits are as good as stock vLLM's.
    if stock_ignores_how_many_rows(hypic):
        assert same(reused, fresh)
    else:
        assert distance(reused, fresh) < 0.1


def test_another_order_of_documents_has_another_stream(hypic: Engine) -> None:
    hypic.ask(first_turn())
    (answer,) = hypic.ask(Ask(prompt(TWO, ONE, query=QUESTION, lead=LEAD)))
    assert answer.cached == RECORDED, "records are reused, the stream is not"


def test_tenants_share_neither_records_nor_streams(hypic: Engine) -> None:
    (open_answer,) = hypic.ask(first_turn())
    keys = hypic.call(resident)
    found = []
    for salt in ("tenant-a", "tenant-b"):
        (cold,) = hypic.ask(first_turn(salt=salt))
        assert cold.cached == 0, f"{salt} read {cold.cached} tokens that others had computed"
        new = hypic.call(resident) - keys
        assert len(new) == 3, f"{salt} has {len(new)} records of its own, expected 3"
        keys |= new
        (warm,) = hypic.ask(first_turn(salt=salt))
        assert warm.cached >= RECORDED + 2 * BLOCK, "a tenant finds its own records and stream"
        found.append(cold)
    # Only identity differs, not the arithmetic.
    assert found[0].logprobs == found[1].logprobs == open_answer.logprobs


def test_approximate_streams_and_exact_prompts_never_meet(hypic: Engine) -> None:
    """A prompt that happens to be the stream of a composed request has other positions and states."""
    ask = first_turn()
    stream = hypic.call(stream_of, ask)
    assert len(stream.tokens) > 2 * BLOCK

    hypic.ask(ask)
    (after,) = hypic.ask(stream)
    assert after.cached == 0, "an ordinary request read a composed request's KV"
    (again,) = hypic.ask(stream)
    assert again.cached == 2 * BLOCK

    hypic.reset()
    hypic.ask(stream)
    (composed,) = hypic.ask(ask)
    assert composed.cached == 0, "a composed request read an ordinary request's KV"


def test_link_methods_with_equal_streams_do_not_share_them(hypic: Engine) -> None:
    """``naive`` reads the same records as ``hypic`` and computes the same tokens, but other states."""
    hypic.ask(first_turn())
    (naive,) = hypic.ask(first_turn(extra={"hypic_link": "naive"}))
    assert naive.cached == RECORDED, "records are shared, the stream must not be"


def test_opting_out_shares_the_ordinary_prefix_cache(hypic: Engine) -> None:
    """``full`` computes everything exactly: the same KV as the prompt without separators."""
    asked = first_turn(extra={"hypic_link": "full"})
    plain, full = hypic.ask_one_by_one(asked.plain(), asked)
    assert full.cached == len(asked.plain().tokens) // BLOCK * BLOCK
    assert full.tokens == plain.tokens
