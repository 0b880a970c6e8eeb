"""Counts of replayed prompts, by hand, and which of several candidates is recommended."""

from itertools import accumulate, chain, pairwise
from types import SimpleNamespace

import pytest

from vllm_hypic.primitives.pieces import ParsedPrompt, cut_prompt
from vllm_hypic.primitives.policies import parse_link
from vllm_hypic.suggest.candidates import recommended
from vllm_hypic.suggest.replay import Linking, PrefixCaches, Replay

LEAD, A, B, QUERY = (tuple(range(100 * i, 100 * i + n)) for i, n in enumerate((16, 40, 50, 9)))


def cut(*segments: tuple[int, ...], query: tuple[int, ...] = QUERY) -> ParsedPrompt:
    ends = list(accumulate(map(len, segments), initial=len(LEAD)))
    return cut_prompt((*LEAD, *chain(*segments), *query), tuple(pairwise(ends)))


def replay(link: str = "hypic", **options: int) -> Replay:
    return Replay(Linking(parse_link(link, 4), options.get("least", 8), 4096), PrefixCaches(16))


def test_whole_blocks_before_the_last_token_are_cached() -> None:
    caches = PrefixCaches(4)
    one, other = caches.add(), caches.add()
    ids = list(range(12))
    assert caches.cached(one, ids, None) == 0
    assert caches.cached(one, ids, None) == 8, "the last token is computed"
    assert caches.cached(one, [*ids, 12], None) == 12
    assert caches.cached(one, [*ids[:7], 99, *ids[8:], 12], None) == 4, "nothing counts behind a gap"
    assert caches.cached(one, [99, *ids], None) == 0
    assert caches.cached(one, ids, "salt") == caches.cached(other, ids, None) == 0


def test_records_serve_in_any_order_but_for_seams() -> None:
    engine = replay()
    assert engine.answer((), cut(A, B), None) == 0
    assert engine.answer((), cut(B, A), None) == len(LEAD) + len(A) + len(B) - 2 * 8
    assert engine.record_tokens == len(LEAD) + len(A) + len(B) - 2 * 8
    assert engine.segment_tokens == 2 * (len(A) + len(B)) and engine.pieces == [2, 2]
    assert engine.tokens == 2 * (len(LEAD) + len(A) + len(B) + len(QUERY))
    # A prompt does not reuse what it computes itself.
    engine = replay("block")
    assert engine.answer((), cut(A, A), None) == 0
    assert engine.answer((), cut(A), None) == len(LEAD) + len(A)


def test_the_same_records_in_the_same_order_share_a_stream() -> None:
    engine = replay()
    engine.answer((), cut(A, query=tuple(range(900, 940))), None)
    longer = engine.answer((), cut(A, query=tuple(range(900, 960))), None)
    assert longer == len(LEAD) + len(A) - 8 + 48, "seams and query are 48 tokens in vLLM's own cache"


def test_tenants_and_uncut_prompts_have_caches_of_their_own() -> None:
    engine = replay()
    engine.answer((), cut(A, B), "a")
    assert engine.answer((), cut(A, B), "b") == 0 < engine.answer((), cut(A, B), "a")
    assert [engine.answer(LEAD + A + B + QUERY, None, salt) for salt in ("a", "b", "a")] == [0, 0, 112]


@pytest.mark.parametrize(
    ("candidates", "right"),
    [
        ([("text", 3, 0.80), ("structure", 2, 0.79), ("off", 1, 0.70)], "structure"),
        ([("text", 3, 0.80), ("structure", 2, 0.77)], "text"),
        ([("cdc, 512", 5, 0.80), ("cdc, 1024", 5, 0.79)], "cdc, 512"),
        ([("text", 3, 0.50), ("prefix caching alone", 0, 0.49)], "prefix caching alone"),
    ],
)
def test_the_simplest_within_two_points_of_the_best(candidates: list[tuple], right: str) -> None:
    found = [SimpleNamespace(name=n, rank=r, replay=SimpleNamespace(reuse=u)) for n, r, u in candidates]
    assert recommended(found).name == right
