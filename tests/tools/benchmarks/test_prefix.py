"""``benchmarks prefix``: traces, replay against a plain model of it, the bound, the command."""

import json
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from commands import measured

from benchmarks.eviction_shapes import SHAPES
from benchmarks.eviction_traces import Segment, save
from benchmarks.eviction_traces import generate as segments
from benchmarks.placers import PLACERS
from benchmarks.prefix import block_tokens, measure
from benchmarks.prefix_engines import ask_of, tokens_of
from benchmarks.prefix_lines import GRID, Tree, foreseen, kept, planned
from benchmarks.prefix_replay import Policy, replay
from benchmarks.prefix_traces import PREFIX_KINDS, Turn, generate, load

SHAPE = SHAPES["random-150m"]
EVERY = Policy("every", GRID, every=GRID, prompt_end=True)


def turn(*pieces: tuple[str, int], answer: int = GRID, salt: str = "") -> Turn:
    made = [Segment(name, tokens) for name, tokens in pieces]
    return Turn.of(salt, made, Segment(f"answer to {pieces}", answer))


def contents(of: Turn) -> list[tuple[str, int]]:
    """Every token by name: what a piece is behind another text is another matter, and follows from the
    order."""
    return [(piece.id, i) for piece in of.pieces for i in range(piece.tokens)]


def alike(one: list, other: list) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("kind", PREFIX_KINDS)
def test_what_lines_share_is_what_texts_share(kind):
    turns = generate(kind, 40, seed=1)
    assert turns == generate(kind, 40, seed=1) != generate(kind, 40, seed=2)
    tree, former = Tree.of(turns), []
    for line, one in zip(tree.lines, turns, strict=True):
        text = [one.salt, *contents(one)]
        common = [alike(text, other) for other in former]
        assert line.shared == max(0, min(one.prompt, max(common, default=0) - 1))
        assert line.tokens == len(text) - 1 > line.prompt == one.prompt
        former.append(text)


def test_replays_by_hand():
    # States, K and V are counted once.
    one, two = ("a", 640), ("b", 640)
    tree = Tree.of([turn(one, two), turn(one, two), turn(one), turn(one, salt="other")])
    state, token = SHAPE.state_bytes, SHAPE.token_bytes
    policy = Policy("ends", GRID)
    # The first leaves a state at 1344; the second shares 1280, keeps it there, and its own end is another.
    room = 2 * state + 1344 * token
    assert replay(tree, SHAPE, room, policy, 0, 2).states == 2
    assert replay(tree, SHAPE, room - 1, policy, 0, 1).states == 1
    assert replay(tree, SHAPE, state + 1344 * token - 1, policy, 0, 1).states == 0
    assert tree.lines[3].shared == 0, "another tenant's"
    # Branches serve from the third time on.
    tree = Tree.of([turn(("a", 640), (f"q{i}", 64)) for i in range(4)])
    assert replay(tree, SHAPE, 2**60, Policy("branches", GRID)).saved.tokens == 2 * 640
    assert replay(tree, SHAPE, 2**60, Policy("ends", GRID, branch=False)).saved.tokens == 0
    # A state at every boundary and no limit saves all that was seen.
    tree = Tree.of(generate("edits", 60, seed=0))
    found = replay(tree, SHAPE, 2**60, EVERY)
    assert found.saved.tokens == sum(min(x.shared, x.prompt - 1) // GRID * GRID for x in tree.lines)


@pytest.mark.parametrize("kind", PREFIX_KINDS)
def test_no_policy_exceeds_the_bound_or_what_was_seen(kind):
    found = measure(kind, generate(kind, 250, seed=3), SHAPE, (0.05, 0.3), 2)
    for row in found.rows:
        for name, outcome in row.outcomes.items():
            assert outcome.saved.flops <= row.bound_flops * (1 + 1e-9) <= found.seen.flops * (1 + 1e-6), name
    for of in zip(*found.placements.values(), found.placements["oracle"], strict=True):
        assert max(of) <= of[-1] * (1 + 1e-9)


def test_learned_states_beat_equal_ones_at_equal_bytes():
    for kind in PREFIX_KINDS:
        tree = Tree.of(generate(kind, 600, seed=5))
        for states, gain in ((1, 1.1), (4, 1.05)):
            plans = {n: planned(tree, SHAPE, PLACERS[n], states, alone=True) for n in ("equal", "optimal")}
            assert all(len(plan) <= states for plan in plans["optimal"])
            equal, learned = (kept(tree, SHAPE, plans[n]) for n in ("equal", "optimal"))
            assert gain * equal < learned < kept(tree, SHAPE, foreseen(tree, SHAPE, states)), (kind, states)


SHAREGPT = [{"conversations": [{"from": s, "value": s * 100} for s in ("human", "gpt", "human", "gpt")]}]
TIMED = [{"timestamp": t, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, t]} for t in (3, 4)]


def test_files_of_three_forms(tmp_path: Path):
    chats, timed, mine = (tmp_path / name for name in ("chats.json", "timed.jsonl", "mine.jsonl"))
    chats.write_text(json.dumps(SHAREGPT))
    timed.write_text("\n".join(map(json.dumps, TIMED)))
    save(mine, segments("rag", 5, seed=0))
    assert [(t.prompt, len(t.pieces)) for t in load(chats, 16, 0)] == [(126, 2), (328, 4)]
    assert [x.shared for x in Tree.of(load(timed, 16, 0)).lines] == [0, 32]
    assert len(load(mine, 16, 0)) == 5
    # A block of vLLM is the page of a state.
    assert block_tokens(SHAPES["qwen3.5-35b-a3b"]) == 1056 and block_tokens(SHAPES["marconi-7b"]) == 64


SMALL = ("--kind", "rag", "--requests", 40, "--sizes", "0.05,0.3", "--shape", "random-150m")


@pytest.mark.parametrize(
    ("command", "parts"),
    [(("eviction",), {"below lru: yes"}), (("prefix", "--simulate", "--block-32"), {"block-32", "oracle"})],
    ids=["eviction", "prefix"],
)
def test_commands_write_tables_json_and_plot(tmp_path: Path, command: tuple[str, ...], parts: set[str]):
    output, report = measured(tmp_path, *command, *SMALL)
    assert all(part in output for part in parts | {"rag", "token hit rate", "FLOPs saved"})
    [trace] = report["results"]["traces"]
    assert trace["requests"] == 40 and len(trace["rows"]) == 2


def test_prompts_of_engines_begin_alike_where_their_texts_do():
    words = np.arange(1000, 3000)
    turns = generate("conversations", 40, seed=1)
    texts = [(one.salt, contents(one)[: one.prompt]) for one in turns]
    prompts = [tokens_of(one, words, 1.0) for one in turns]
    for i, (salt, text) in enumerate(texts):
        assert len(prompts[i]) == len(text)
        for other in range(i):
            common = alike(text, texts[other][1]) if salt == texts[other][0] else 0
            assert common <= alike(prompts[i], prompts[other]) <= common + 3, "by chance a word more"


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_the_next_turn_has_the_answer_that_engines_were_given(scale: float):
    words = np.arange(1000, 3000)
    turns = [ask_of(one, words, scale, answered=True) for one in generate("conversations", 60, seed=1)]
    gone_on = 0
    for i, turn in enumerate(turns):
        so_far = [*turn.tokens, *turn.forced]
        gone_on += any(later.tokens[: len(so_far)] == so_far for later in turns[i + 1 :])
        assert turn.forced
    assert gone_on > 10
    one = generate("conversations", 1, seed=1)[0]
    assert ask_of(one, words, scale, answered=False).tokens == tokens_of(one, words, scale)


@pytest.mark.slow
@pytest.mark.engine
def test_engines_beside_two_stock_engines(tmp_path: Path):
    output, report = measured(
        tmp_path,
        *("prefix-engines", "--size", "tiny", "--kind", "conversations", "--requests", 12, "--scale", 0.1),
        *("--kv-gib", 0.25, "--longest", 2048, "--eager", "--threads", 1),
        *("--stock", "{}", "--stock", '{"prefix_match_unit": 16}'),
    )
    [found] = report["results"]["traces"]
    stock, ours = {side["engine"]: side for side in found["stock"]}, found["hypic"]
    assert list(stock) == ["stock", "stock prefix_match_unit=16"] and ours["engine"] == "hypic"
    medians = {name: side["first_token"]["median"] for name, side in stock.items()}
    assert found["best"] == min(medians, key=medians.__getitem__)
    # Prompts are too short for whole blocks of the hybrid's cache.
    assert stock["stock"]["hit_rate"] <= stock["stock prefix_match_unit=16"]["hit_rate"] < 1
    assert 0 <= ours["hit_rate"] < 1
    assert len(found["sooner"]["values"]) == 9, "requests behind the first quarter"
    assert f"sooner than {found['best']}" in output
