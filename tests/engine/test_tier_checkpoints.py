"""Checkpoints that come from a disk tier, in an engine that was restarted: nothing but what is computed again
differs from one that was not."""

import os
import signal
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from lib.oracle import random_segments

from vllm_hypic.store.record import VERSION
from vllm_hypic.store.tiers.disk_files import HEAD_BYTES

from .conftest import EngineFactory
from .engines import Answer, Ask, Engine, EngineError, all_same, largest_distance, prompt, same, store_of
from .test_checkpoints import RESUMED
from .test_prefix_passes import OPTIONS as SPARSE
from .test_prefix_passes import PAGE
from .test_store import on_disk, stored

OPTIONS = SPARSE | {"checkpoint_tokens": 64, "seam_tokens": 8}
SYSTEM, LOST, DOCUMENT, QUERY, *PARTS = random_segments(
    [70, 150, 300, 12, 150, 133, 90, 61, 77, 85, 66], vocab=480, seed=31
)
ROUNDING = 0.3
"""Of logprobs, in bfloat16: of K that is rotated back and forth, and of passes that end elsewhere.  Other
prompts are 10 apart."""

TURNS, LOST_TURNS = ([*accumulate([first, *PARTS[1:3]])] for first in (SYSTEM + PARTS[0], LOST))
"""Prompts of conversations."""
FORKS = [LOST[:70] + part for part in PARTS[3:]]
"""Prompts that part behind so many tokens, which another has, too."""


def plain(tokens: list[int], salt: str | None = None) -> Ask:
    return Ask(tuple(tokens), 4, sampling={"logprobs": -1}, salt=salt)


def document(*more: int) -> Ask:
    return Ask(prompt([*DOCUMENT, *more], query=QUERY), 4, sampling={"logprobs": -1})


FORMER = plain(TURNS[0], salt="former")
BEFORE = [plain(TURNS[0]), plain(TURNS[1]), document(), *map(plain, FORKS[:3])]
AFTER = [plain(TURNS[2]), document(*PARTS[0][:9]), plain(FORKS[3])]


@dataclass(frozen=True)
class Restarted:
    engine: Engine
    sizes: list[float]
    """Bytes that were stored for each of ``BEFORE``."""
    before: list[Answer]
    foreign: int
    """Records found of another version of the format: that of ``FORMER``."""
    alone: dict[str, Answer]
    """By case: to a turn whose predecessor's record rests on a file that is gone; to ``FORMER``; and to the
    third of prompts that part, two of which came before the restart."""


def as_version(version: int, file: Path) -> None:
    """A tier's file holds a sound record that says so of itself."""
    changed = bytearray(file.read_bytes())
    record = memoryview(changed)[HEAD_BYTES:]
    assert version_of(file) == VERSION != version
    struct.pack_into("<I", record, 8, version)
    (payload,) = struct.unpack_from("<Q", record, 16)
    start = len(record) - payload
    struct.pack_into("<I", record, 28, zlib.crc32(bytes(record[:28]) + bytes(record[32:start])))
    file.write_bytes(changed)


def version_of(file: Path) -> int:
    (version,) = struct.unpack_from("<I", file.read_bytes(), HEAD_BYTES + 8)
    return int(version)


def written(llm: Any) -> float:
    assert store_of(llm).drain(30)
    return float(store_of(llm).stats().tiers["disk"].written_bytes)


def files_of(engine: Engine, folder: Path, asked: Ask) -> set[Path]:
    others = set(folder.rglob("*.hypic"))
    engine.ask(asked)
    engine.call(written)
    return set(folder.rglob("*.hypic")) - others


def foreign(llm: Any) -> int:
    return int(store_of(llm).stats().tiers["disk"].corrupt)


@pytest.fixture(scope="module")
def restarted(
    model: Path, module_engine: EngineFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Restarted]:
    folder = tmp_path_factory.mktemp("disk")
    arguments = {"max_logprobs": -1, "disable_log_stats": False, "options": OPTIONS | stored(on_disk(folder))}
    with module_engine(model, **arguments) as engine:
        answers, sizes, seen = [], [], 0.0
        for asked in BEFORE:
            answers += engine.ask(asked)
            sizes.append(engine.call(written) - seen)
            seen += sizes[-1]
        [base] = files_of(engine, folder, plain(LOST_TURNS[0], salt="lost"))
        files_of(engine, folder, plain(LOST_TURNS[1], salt="lost"))
        base.unlink()
        for fork in FORKS[:2]:
            files_of(engine, folder, plain(fork, salt="kept"))
        [former] = files_of(engine, folder, FORMER)
        as_version(VERSION - 1, former)
    with module_engine(model, **arguments) as engine:
        (turn,), found = engine.ask(plain(LOST_TURNS[2], salt="lost")), engine.call(foreign)
        (again,) = engine.ask(FORMER)
        found = engine.call(foreign) - found
        (third,) = engine.ask(plain(FORKS[2], salt="kept"))
        assert engine.call(written)
        assert version_of(former) == VERSION, "it is stored anew"
        yield Restarted(engine, sizes, answers, found, dict(zip(ALONE, (turn, again, third), strict=True)))
        engine.check_clean()


def pages(tokens: list[int]) -> int:
    """Tokens of a prompt's record."""
    return (len(tokens) - 1) // PAGE * PAGE


def test_what_was_cached_is_cached(restarted: Restarted) -> None:
    engine = restarted.engine
    assert engine.ask(plain(TURNS[2], salt="another"))[0].cached == 0, "tenants share nothing"
    before = engine.metrics().get(RESUMED, 0.0)
    turn, grown, fork = engine.ask_one_by_one(*AFTER)
    assert turn.cached == pages(TURNS[1]), "the turn before"
    assert fork.cached == 70 // PAGE * PAGE, "where three have parted"
    # Behind a head of 8 there are checkpoints at 72, 136, 200, 264.
    assert engine.metrics()[RESUMED] - before == turn.cached + fork.cached + 264 - 8
    found = (*restarted.before, turn, grown, fork, *engine.ask_one_by_one(*AFTER))
    engine.reset()
    assert all_same(found, engine.ask_one_by_one(*BEFORE, *AFTER, *AFTER))


def weight(restarted: Restarted) -> tuple[float, float]:
    """Bytes of a turn's record that do not grow with its tokens, and so many as a token takes."""
    first, second, *_ = restarted.sizes
    own, grown = pages(TURNS[0]), pages(TURNS[1]) - pages(TURNS[0])
    states = (first * grown - second * own) / (grown - own)
    return states, (first - states) / own


def test_a_conversation_is_stored_once(restarted: Restarted) -> None:
    """A turn without the columns of the turn before."""
    (states, _), (first, second, *_) = weight(restarted), restarted.sizes
    assert 0 <= states < 0.5 * first and second < first, restarted.sizes


def test_what_shares_less_than_states_weigh_is_stored_whole(restarted: Restarted) -> None:
    """Who fetches it reads no states but its own."""
    engine, longer = restarted.engine, SYSTEM + PARTS[3]
    sizes = [engine.call(written)]
    for tokens, salt in ((SYSTEM, "grows"), (longer, "grows"), (longer, "whole")):
        engine.ask(plain(tokens, salt=salt))
        sizes.append(engine.call(written))
    _, grown, whole = (after - before for before, after in pairwise(sizes))
    states, token = weight(restarted)
    assert (grown == whole) == (states > pages(SYSTEM) * token), (grown, whole)


ALONE = {
    # The first turn's file is gone, and the second rests on it.
    "without-what-it-rests-on": ([plain(LOST_TURNS[2], salt="lost")], 0),
    "of-another-version": ([FORMER], 0),
    # Nobody had gone on from there.
    "where-two-have-parted": ([plain(fork, salt="kept") for fork in FORKS[:3]], 70 // PAGE * PAGE),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_the_restart_left_is_what_a_new_engine_has(restarted: Restarted, case: str) -> None:
    (asks, cached), found = ALONE[case], restarted.alone[case]
    assert found.cached == cached and restarted.foreign == 1
    restarted.engine.reset()
    assert same(restarted.engine.ask_one_by_one(*asks)[-1], found)


def die_behind_one_object(llm: Any) -> None:
    """``kill -9`` when the disk tier has written the next object, and all but the name of one more."""
    rename, done = os.rename, []

    def renamed(source: Path, to: Path) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(to)
        rename(source, to)

    os.rename = renamed  # type: ignore[assignment]


def test_a_crash_between_a_record_and_its_checkpoint(
    start_engine: EngineFactory, hybrid_model: Path, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"max_logprobs": -1, "options": OPTIONS | stored(on_disk(tmp_path))}
    with start_engine(hybrid_model, **arguments) as engine:
        engine.ask(plain(FORKS[0]))
        engine.call(written)
        others = set(tmp_path.rglob("*.hypic"))
        engine.call(die_behind_one_object)
        with pytest.raises(EngineError, match="died"):
            files_of(engine, tmp_path, plain(FORKS[1]))
    assert len(set(tmp_path.rglob("*.hypic")) - others) == 1, "the record, and no checkpoint"
    assert list((tmp_path / "partial").iterdir())

    with start_engine(hybrid_model, **arguments) as engine:
        forks = [plain(fork) for fork in (*FORKS[1:], FORKS[0][:70] + PARTS[0])]
        found = engine.ask_one_by_one(*forks)
        # Behind the restart it takes two anew to show where they part.
        assert [answer.cached for answer in found] == [pages(FORKS[1]), 0, 0, 70 // PAGE * PAGE]
        assert engine.call(foreign) == 0
        engine.check_clean()
        engine.call(written)
        assert not list((tmp_path / "partial").iterdir())
        engine.reset()
        assert largest_distance(found, engine.ask_one_by_one(*forks)) < ROUNDING
