"""Files of the disk tier: what they hold, what a killed process leaves, and a failing disk."""

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.protocol import ObjectName
from vllm_hypic.store.tiers import disk_files
from vllm_hypic.store.tiers.base import TierError, TierFull
from vllm_hypic.store.tiers.disk import DiskTier
from vllm_hypic.store.tiers.disk_files import PARTIAL

from .conftest import HEAD_BYTES, place
from .tier_contract import content, got, name, put, value, view

# -- files


def test_a_file_is_a_head_and_the_bytes(tier, tmp_path):
    data = put(tier, 1, 300)
    file = place(tmp_path, 1)
    assert file.read_bytes()[HEAD_BYTES:] == data
    assert file.stat().st_size == HEAD_BYTES + 300
    assert file.stat().st_mode & 0o077 == 0
    assert list((tmp_path / PARTIAL).iterdir()) == []


NO_NAMES = ["", "a", "../../etc/passwd", "ab/cd", "ab\0", "..", "AB", "ab\n"]
NO_NAMES += ["zz" * 32, ".abc", "a" * 97, "ab\\cd", "äb"]


@pytest.mark.parametrize("bad", NO_NAMES)
def test_names_that_are_none(tier, tmp_path, bad):
    before = sorted(tmp_path.rglob("*"))
    for operation in (
        lambda: tier.put(ObjectName(bad), view(b"x"), value(1)),
        lambda: tier.get(ObjectName(bad), 10),
        lambda: tier.delete(ObjectName(bad)),
    ):
        with pytest.raises(ValueError, match="hex digits"):
            operation()
    assert not tier.may_hold(ObjectName(bad))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_longest_name(tier):
    longest = ObjectName("ab" + "." * 94)
    tier.put(longest, view(b"x"), value(1))
    assert tier.get(longest, 1) == b"x"


@pytest.mark.parametrize("nbytes", [0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 299, HEAD_BYTES + 301])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_file_of_another_length_is_deleted_and_counted(tier, on_disk, tmp_path, nbytes, reopened):
    put(tier, 1, 300)
    kept = put(tier, 2, 300)
    os.truncate(place(tmp_path, 1), nbytes)
    if reopened:
        tier.close()
        tier = on_disk()
        assert not tier.may_hold(name(1))
    assert got(tier, 1) is None
    assert not place(tmp_path, 1).exists()
    assert tier.counts.damaged == 1
    assert got(tier, 2) == kept


@pytest.mark.parametrize("at", range(HEAD_BYTES))
def test_an_altered_head_is_damage(tier, tmp_path, at):
    put(tier, 1, 300)
    with open(place(tmp_path, 1), "r+b") as f:
        byte = os.pread(f.fileno(), 1, at)[0]
        os.pwrite(f.fileno(), bytes([byte ^ 1]), at)
    assert got(tier, 1) is None
    assert tier.counts.damaged == 1
    assert not place(tmp_path, 1).exists()


def test_no_memory_is_taken_for_a_lying_length(tier, tmp_path, monkeypatch):
    put(tier, 1, 300)
    os.truncate(place(tmp_path, 1), 1 << 40)
    monkeypatch.setattr(disk_files, "aligned_buffer", lambda nbytes: pytest.fail(f"{nbytes} bytes taken"))
    assert got(tier, 1) is None


def test_files_of_others_are_not_touched(tier, on_disk, tmp_path):
    put(tier, 1, 100)
    folder = place(tmp_path, 1).parent
    others = [
        tmp_path / "README",
        tmp_path / "0" / "0" / "notes.txt",
        folder / "UPPER.hypic",
        folder / f"{name(1)}.hypic.bak",
        tmp_path / "0" / "1" / f"{name(1)}.hypic",
        tmp_path / PARTIAL / "mine",
        tmp_path / PARTIAL / f"{name(1)}.12",
    ]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(b"not ours")
    link = place(tmp_path, 2)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "README")
    place(tmp_path, 3).mkdir(parents=True)
    tier.close()
    tier = on_disk()
    assert got(tier, 2) is None and got(tier, 3) is None
    assert not tier.may_hold(name(2)) and not tier.may_hold(name(3))
    assert {h.name for h in tier.held()} == {name(1)} and tier.used()[0] == 100
    tier.clear()
    assert [other.read_bytes() for other in others] == [b"not ours"] * len(others)
    assert link.is_symlink() and place(tmp_path, 3).is_dir()
    assert not place(tmp_path, 1).exists()
    tier.close()  # the audit takes strangers' files for its own


def test_short_reads_and_writes(tier, monkeypatch):
    monkeypatch.setattr(disk_files, "_MOST_AT_ONCE", 7)
    assert put(tier, 1, 300) == got(tier, 1)


def test_a_file_that_shrinks_while_it_is_read(tier, tmp_path, monkeypatch):
    put(tier, 1, 300)

    def truncated(fd, buffers, offset):
        os.truncate(place(tmp_path, 1), offset + 10)
        monkeypatch.undo()
        return os.preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncated)
    assert got(tier, 1) is None
    assert tier.counts.damaged == 1


# -- restarts


@pytest.fixture
def aged(tier, tmp_path):
    """Has four objects that were used one after the other."""
    for i in range(4):
        put(tier, i, 250)
        os.utime(place(tmp_path, i), ns=(i, i))
    return tier


def test_order_of_use_survives(aged, on_disk):
    assert got(aged, 0) is not None
    aged.close()
    tier = on_disk()
    put(tier, 4, 500)
    assert {h.name for h in tier.held()} == {name(3), name(0), name(4)}


def test_a_smaller_budget_evicts_at_opening(aged, on_disk):
    aged.close()
    tier = on_disk(600)
    assert {h.name for h in tier.held()} == {name(2), name(3)}
    assert tier.used() == (500, 600)


def test_pins_made_before_opening_hold(aged, tmp_path, clock):
    aged.close()
    tier = DiskTier("disk", tmp_path, 300, LruPolicy(), clock=clock, durable=False)
    tier.pin(name(0))
    tier.open()
    assert {h.name for h in tier.held()} == {name(0)}


def test_many_objects(on_disk):
    """All are found again; the opening reads one head of each."""
    first = on_disk(1 << 30)
    for i in range(500):
        first.put(name(i), view(bytes(i)), value(i, tokens=i))
    first.close()
    tier = on_disk(1 << 30)
    assert {h.name: h.value for h in tier.held()} == {name(i): value(i, tokens=i) for i in range(500)}


WRITER = """
import os, sys, time
from pathlib import Path
from vllm_hypic.store.eviction.policy import LruPolicy
from vllm_hypic.store.tiers.disk import DiskTier
from tests.unit.store.tier_contract import put
tier = DiskTier("disk", Path(sys.argv[1]), 1 << 30, LruPolicy(), durable=True)
tier.open()
if sys.argv[2] == "hang":
    os.fsync = lambda fd: (print("writing", flush=True), time.sleep(600))
for i in range(1_000_000):
    put(tier, i, 200_000 + i)
    print(i, flush=True)
"""


def writer(path: Path, behaviour: str = "write") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), behaviour],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


@pytest.mark.parametrize("after", [1, 4, 9])
def test_killed_while_writing(on_disk, tmp_path, after):
    """Whatever was put is there, whole; whatever was not is absent; nothing else is left."""
    with writer(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == after:
                break
        process.kill()
        said = [after, *map(int, process.stdout.read().split())]
        process.wait(30)
    tier = on_disk(1 << 30)
    last = said[-1]
    for i in range(last + 1):
        assert got(tier, i) == content(i, 200_000 + i)
    # The one being written when the signal came may have been complete.
    assert got(tier, last + 1) in (None, content(last + 1, 200_001 + last))
    assert len(list(tier.held())) in (last + 1, last + 2)


def test_a_killed_writers_partial_file_is_removed_and_a_living_ones_is_not(on_disk, tmp_path):
    with writer(tmp_path, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        partials = list((tmp_path / PARTIAL).iterdir())
        on_disk(1 << 30).close()
        left_alone = list((tmp_path / PARTIAL).iterdir())
        process.kill()
        process.wait(30)
    assert len(partials) == 1 and left_alone == partials
    on_disk(1 << 30).close()
    assert list((tmp_path / PARTIAL).iterdir()) == []


def test_an_opening_process_that_takes_a_new_file_for_a_leftover(tier, tmp_path, monkeypatch):
    """Between its creation and its lock a partial file looks abandoned: the writer begins again."""
    real = fcntl.flock

    def late(fd, operation):
        monkeypatch.undo()
        for file in (tmp_path / PARTIAL).iterdir():
            file.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert put(tier, 1, 100) == got(tier, 1)


# -- a failing disk


@contextmanager
def failing(code: int, *functions: str, after: int = 0, times: int = 1_000_000) -> Iterator[list[str]]:
    """These functions of ``os`` fail after ``after`` calls, ``times`` times together; notes which did."""
    failed: list[str] = []
    calls = itertools.count()

    def replacement(function: str) -> Callable[..., object]:
        real = getattr(os, function)

        def fail(*args, **kwargs):
            if not after <= next(calls) < after + times:
                return real(*args, **kwargs)
            failed.append(function)
            raise OSError(code, os.strerror(code))

        return fail

    with pytest.MonkeyPatch.context() as patch:
        for function in functions:
            patch.setattr(os, function, replacement(function))
        yield failed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("function", ["write", "fsync", "rename"])
def test_full_disk_evicts_and_tries_once_more(on_disk, function, code):
    tier = on_disk(10_000, durable=True)
    for i in range(4):
        put(tier, i, 300)
    with failing(code, function, times=1):
        data = put(tier, 4, 500)
    assert {h.name for h in tier.held()} == {name(2), name(3), name(4)}
    assert got(tier, 4) == data


@pytest.mark.parametrize("objects", [0, 3])
def test_full_disk_that_stays_full_refuses(on_disk, objects):
    tier = on_disk(10_000)
    for i in range(objects):
        put(tier, i, 300)
    with failing(errno.ENOSPC, "write") as failed, pytest.raises(TierFull, match="No space left"):
        put(tier, 4, 500)
    assert len(failed) == (2 if objects else 1)
    assert got(tier, 4) is None
    assert put(tier, 4, 500) == got(tier, 4)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("function", ["open", "write", "fsync", "rename"])
def test_other_faults_of_writing(on_disk, function, code):
    tier = on_disk(durable=True)
    kept = put(tier, 1, 300)
    with failing(code, function), pytest.raises(TierError, match="put") as caught:
        put(tier, 2, 300)
    assert not isinstance(caught.value, TierFull)
    assert got(tier, 1) == kept and got(tier, 2) is None
    assert put(tier, 2, 300) == got(tier, 2)


def test_a_folder_that_cannot_be_made_durable_holds_nothing(on_disk, tmp_path):
    """The last step of a put: the object is in its place, and has to leave it."""
    tier = on_disk(durable=True)
    put(tier, 1, 300)
    tier.delete(name(1))
    with failing(errno.EIO, "fsync", after=1, times=1), pytest.raises(TierError, match="Input/output"):
        put(tier, 1, 300)
    assert not place(tmp_path, 1).exists()


@pytest.mark.parametrize("function", ["open", "pread"])
def test_faults_of_reading(tier, function):
    data = put(tier, 1, 300)
    with failing(errno.EIO, function), pytest.raises(TierError, match="get"):
        tier.get(name(1), 300)
    assert got(tier, 1) == data


def test_read_only_disk_is_read(tier, clock):
    """Nothing can be evicted, expired or noted, and all that is not expired is still found."""
    data = {i: put(tier, i, 300) for i in range(3)}
    tier.expire(name(2), clock() + 1)
    clock.advance(2)
    with failing(errno.EROFS, "unlink", "rename", "utime", "mkdir", "write"):
        assert got(tier, 0) == data[0]
        assert got(tier, 2) is None and not tier.may_hold(name(2))
        with pytest.raises(TierError):
            put(tier, 4, 300)
        with pytest.raises(TierError, match="delete"):
            tier.delete(name(0))
        assert got(tier, 0) == data[0] and got(tier, 1) == data[1]
    assert got(tier, 2) is None
    assert tier.used()[0] == 600


def test_a_victim_that_cannot_be_removed_stays_booked(tier):
    data = put(tier, 1, 600)
    with failing(errno.EROFS, "unlink"), pytest.raises(TierError, match="Read-only"):
        put(tier, 2, 600)
    assert got(tier, 1) == data
    assert tier.used()[0] == 600


def test_opening_where_no_folder_can_be_made(tmp_path, clock):
    (tmp_path / "file").write_bytes(b"")
    tier = DiskTier("disk", tmp_path / "file" / "store", 1000, LruPolicy(), clock=clock)
    with pytest.raises(TierError, match="open"):
        tier.open()
    with pytest.raises(TierError, match="not open"):
        put(tier, 1, 10)
    (tmp_path / "file").unlink()
    tier.open()
    assert put(tier, 1, 10) == got(tier, 1)
    tier.close()


def test_a_file_that_cannot_be_looked_at_is_left_alone(tier, on_disk):
    put(tier, 1, 300)
    tier.close()
    with failing(errno.EIO, "pread"):
        tier = on_disk()
    assert list(tier.held()) == []
    assert got(tier, 1) == content(1, 300)
