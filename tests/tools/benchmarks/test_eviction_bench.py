"""``bench eviction``: traces, replay against exhaustive search, the command."""

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction import measure
from benchmarks.eviction_replay import Accesses, Saved, offline_greedy, replay, reuses, upper_bound
from benchmarks.eviction_shapes import SHAPES
from benchmarks.eviction_traces import KINDS, Request, Segment, generate, load, save
from benchmarks.trace import TraceError
from vllm_hypic.store.eviction.flop_aware import FlopAwarePolicy
from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.protocol import CacheValue, ObjectName


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_seeded_in_order_and_survive_their_file(kind, tmp_path):
    trace = generate(kind, 300, seed=1)
    assert trace == generate(kind, 300, seed=1) != generate(kind, 300, seed=2)
    assert len(trace) == 300
    times = [r.time for r in trace]
    assert times == sorted(times)
    lengths: dict[str, int] = {}
    for request in trace:
        for key, tokens in request.records():
            assert lengths.setdefault(key, tokens) == tokens >= 1
    save(tmp_path / "t.jsonl", trace)
    assert load(tmp_path / "t.jsonl") == trace


def test_conversations_and_agents_ask_for_what_was_there():
    turns: dict[str, list[tuple[Segment, ...]]] = {}
    for request in generate("conversations", 400, seed=0):
        turns.setdefault(request.id, []).append(request.segments)
    assert max(map(len, turns.values())) > 4
    for requests in turns.values():
        assert [len(segments) for segments in requests] == list(range(1, len(requests) + 1))
        for before, after in itertools.pairwise(requests):
            assert after[:-1] == before
    # A memory file that grew is not asked for by later sessions.
    newest: dict[str, dict[str, int]] = {}
    for request in generate("agents", 3000, seed=0):
        mine = newest.setdefault(request.id, {})
        for segment in request.segments:
            if "m" in segment.id and segment.id.startswith("a"):
                file, version = segment.id.rsplit("v", 1)
                assert mine.setdefault(file, int(version)) == int(version), "changed within a session"
    versions = {(file, v) for mine in newest.values() for file, v in mine.items()}
    assert max(v for _, v in versions) > 2
    one, other = Request(0, "r", "a", (Segment("s", 3),)), Request(0, "r", "b", (Segment("s", 3),))
    assert dict(one.records()).keys().isdisjoint(dict(other.records()))
    twice = Request(0, "r", "a", (Segment("s", 3), Segment("s", 3)))
    assert list(twice.records()) == [("a/s", 3)]


LINE = {"time": 1.0, "request": "r", "salt": "", "segments": [["a", 5]]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "t.jsonl:1: no JSON"),
        (["[]"], "t.jsonl:1: expected a JSON object"),
        ([], "has no requests"),
        ([LINE | {"time": -1}], "time=-1: expected seconds, >= 0"),
        ([LINE | {"salt": None}], "salt=null: expected a string"),
        ([LINE | {"segments": [["a", 0]]}], "segments=.*tokens >= 1"),
        ([LINE, LINE | {"time": 0.5}], "t.jsonl:2: time=0.5: expected no less"),
        ([LINE, LINE | {"segments": [["a", 6]]}], "segment '/a' has 6 tokens and had 5 before"),
    ],
)
def test_bad_traces_are_refused_with_the_line(lines, message, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(TraceError, match=message):
        load(path)


def test_records_weigh_what_was_measured():
    """Against docs/benchmarks/cpu/records.json, dead transitions left out."""
    measured = json.loads(Path("docs/benchmarks/cpu/records.json").read_text())["results"]["records"]
    seen = [r for r in measured if r["bound"] == 2.98e-8]
    assert len(seen) >= 3
    for row in seen:
        record = row["record"]
        total = record["pages"] + record["states"] + record["transitions"]
        assert SHAPES["random-150m"].value(row["tokens"]).nbytes == pytest.approx(total, rel=0.05)


def test_a_long_record_saves_more_per_byte():
    for shape in SHAPES.values():
        density = [shape.value(n).flops_per_byte for n in (64, 256, 1024, 4096, 16384)]
        assert density == sorted(density) and density[-1] > 4 * density[0]


NAMES = [ObjectName(name) for name in "abcd"]
VALUE = st.builds(CacheValue, st.just(1), st.integers(1, 9).map(float), st.integers(1, 3))
TINY = st.builds(
    lambda requests, values: Accesses(tuple(requests), dict(zip(NAMES, values, strict=True))),
    st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple), max_size=9),
    st.lists(VALUE, min_size=4, max_size=4),
)


def optimum(accesses: Accesses, budget: int) -> float:
    """Most FLOPs that any cache can save: every choice of what to keep after every request."""
    best: dict[frozenset[ObjectName], float] = {frozenset(): 0.0}
    for names in accesses.requests:
        after: dict[frozenset[ObjectName], float] = {}
        for held, saved in best.items():
            now = saved + sum(accesses.cache_values[name].flops for name in names if name in held)
            could = sorted(held | set(names))
            for count in range(len(could) + 1):
                for kept in map(frozenset, itertools.combinations(could, count)):
                    if sum(accesses.cache_values[name].nbytes for name in kept) <= budget:
                        after[kept] = max(after.get(kept, 0.0), now)
        best = after
    return max(best.values())


@settings(max_examples=150)
@given(accesses=TINY, budget=st.integers(0, 8), alpha=st.sampled_from([0.0, 1.0]))
def test_nobody_beats_the_optimum_and_the_bound_is_one(accesses, budget, alpha):
    best = optimum(accesses, budget)
    assert offline_greedy(accesses, budget).flops <= best
    assert replay(accesses, budget, LruPolicy()).flops <= best
    assert replay(accesses, budget, FlopAwarePolicy(alpha=alpha, patience=5)).flops <= best
    assert upper_bound(accesses, budget) >= best - 1e-9


def value(nbytes: int, flops: float = 1.0) -> CacheValue:
    return CacheValue(nbytes, flops, nbytes)


def test_replays_by_hand():
    # Offline greedy is Belady's rule for equal objects.
    requests = tuple((ObjectName(name),) for name in "abcabdabc")
    accesses = Accesses(requests, {name: value(1) for name in NAMES})
    assert offline_greedy(accesses, 2).flops == optimum(accesses, 2) == 4
    assert replay(accesses, 2, LruPolicy()).flops == 0
    # Bound takes the best and a part of the next.
    a, b = NAMES[:2]
    accesses = Accesses(((a, b), (a,), (b,)), {a: value(2, 10.0), b: value(2, 8.0)})
    assert sorted(reuses(accesses).gaps) == [1, 2]
    # Room: 3 bytes over 2 steps. a takes 2 bytes over 1 step, leaving 4 of b's 4.
    assert upper_bound(accesses, 3) == pytest.approx(18.0)
    # 2 bytes over 2 steps: 2 of b's 4.
    assert upper_bound(accesses, 2) == pytest.approx(14.0)
    assert upper_bound(accesses, 1) == 0, "neither fits"


@given(accesses=TINY, budget=st.integers(0, 8))
def test_replay_with_lru_is_lru(accesses, budget):
    held: OrderedDict[str, int] = OrderedDict()
    tokens = 0
    for names in accesses.requests:
        missing = [name for name in names if name not in held]
        for name in names:
            if name in held:
                held.move_to_end(name)
                tokens += accesses.cache_values[name].tokens
        for name in missing:
            if (size := accesses.cache_values[name].nbytes) <= budget:
                while sum(held.values()) + size > budget:
                    held.popitem(last=False)
                held[name] = size
    assert replay(accesses, budget, LruPolicy()).tokens == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_flop_aware_is_never_more_than_one_percent_below_lru(kind):
    found = measure(kind, generate(kind, 400, seed=3), SHAPES["random-150m"], (0.02, 0.1, 0.3))
    for row in found.rows:
        assert min(row.gain()) >= -0.01
        assert row.lru.flops <= row.bound_flops and row.greedy.flops <= row.bound_flops * (1 + 1e-9)
        assert row.lru.tokens <= found.unlimited.tokens < found.asked.tokens
    assert max(max(row.gain()) for row in found.rows) > 0.02


def test_an_ample_cache_keeps_everything():
    found = measure("t", generate("rag", 60, seed=0), SHAPES["random-150m"], (1.0,))
    [row] = found.rows
    assert row.lru == row.flop_aware == row.greedy == found.unlimited
    assert found.contention(row) == "ample"
    assert Saved(0, 0.0) != found.unlimited


def test_command_takes_a_file(tmp_path):
    save(tmp_path / "mine.jsonl", generate("agents", 40, seed=0))
    done = run("eviction", "--trace", tmp_path / "mine.jsonl", "--sizes", "0.2")
    assert done.exit_code == 0 and "mine" in done.output, done.output
