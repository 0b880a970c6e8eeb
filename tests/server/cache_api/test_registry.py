"""The registry of compiled segments: of one engine, of engines that share a folder, and of replicas."""

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from vllm_hypic.cache_api.answers import CacheStats, Place, Segment, SegmentPage
from vllm_hypic.cache_api.commands import Failure
from vllm_hypic.cache_api.registry import RegistryError, SegmentRegistry, registry_folder
from vllm_hypic.cache_api.replicas import joined
from vllm_hypic.config.store import StoreConfig

from .conftest import KEY, NAMESPACE, OTHER_KEY


def test_the_same_segment_has_the_same_id(registry, clock):
    first = registry.add("me", Place.INTERIOR, [1, 2, 3], key=KEY)
    clock.now += 5
    again = registry.add("me", Place.INTERIOR, [1, 2, 3], text="abc", key=OTHER_KEY)
    assert again.id == first.id and again.created == 1000 and again.last_used == 1005
    assert again.key == OTHER_KEY, "the record of today's configuration"
    assert registry.content("me", first.id).text == "abc"
    registry.add("me", Place.INTERIOR, [1, 2, 3])
    assert registry.content("me", first.id).text == "abc", "a text once given stays"
    others = [
        registry.add("you", Place.INTERIOR, [1, 2, 3]),
        registry.add("me", Place.PROMPT, [1, 2, 3]),
        registry.add("me", Place.CHAT, [1, 2, 3]),
        registry.add("me", Place.INTERIOR, [1, 2]),
    ]
    assert len({first.id, *(e.id for e in others)}) == 5


def test_content_comes_back_by_long_random_ids(registry):
    tokens = [0, 7, 250_000, 2**24 - 1]
    entry = registry.add("me", Place.PROMPT, tokens, bare_from=1)
    content = registry.content("me", entry.id)
    found = (content.place, content.tokens, content.text, content.bare_from)
    assert found == (Place.PROMPT, tuple(tokens), None, 1) and entry.n_tokens == 4
    ids = [registry.add("me", Place.INTERIOR, [i]).id for i in range(50)]
    assert all(re.fullmatch("[0-9a-f]{48}", i) for i in ids), "192 bits; a command takes no id for an option"
    assert len({i[:6] for i in ids}) > 45, "no common beginning"


def test_an_id_of_somebody_else_is_an_unknown_id(registry):
    entry = registry.add("me", Place.INTERIOR, [1], text="mine")
    for owner, segment_id in (("you", entry.id), ("me", "nonsense"), ("me", entry.id + "\x00"), ("", "")):
        assert registry.get(owner, segment_id) is None
        assert registry.content(owner, segment_id) is None
        assert registry.remove(owner, segment_id) is None
        registry.set_pinned(owner, segment_id, True)
        registry.set_expires(owner, segment_id, 1.0)
    mine = registry.get("me", entry.id)
    assert mine is not None and not mine.pinned and mine.expires is None
    assert registry.page("you", "", 10) == []
    # One search of one index by (owner, id): nothing about a foreign row is read before the answer.
    plan = registry._db.execute(
        "EXPLAIN QUERY PLAN SELECT id FROM segments WHERE owner = ? AND id = ?", ("you", "x")
    ).fetchall()
    assert [row[3] for row in plan] == ["SEARCH segments USING PRIMARY KEY (owner=? AND id=?)"]


def test_expired_entries_are_gone_and_taken_once(registry, clock):
    entry = registry.add("me", Place.INTERIOR, [1], key=KEY)
    stays = registry.add("me", Place.INTERIOR, [2])
    registry.set_expires("me", entry.id, 1010.0)
    clock.now = 1009.9
    assert registry.get("me", entry.id) is not None and registry.take_expired() == []
    clock.now = 1010.0
    assert registry.get("me", entry.id) is None and registry.content("me", entry.id) is None
    assert [e.id for e in registry.page("me", "", 10)] == [stays.id] and registry.claims(KEY) == []
    assert [e.id for e in registry.take_expired()] == [entry.id]
    assert registry.take_expired() == []
    assert registry.add("me", Place.INTERIOR, [1]).id != entry.id, "an id that expired never comes back"


def test_pages_cover_everything_once(registry):
    ids = {registry.add("me", Place.INTERIOR, [i]).id for i in range(7)}
    registry.add("you", Place.INTERIOR, [1])
    seen: list[str] = []
    while page := registry.page("me", seen[-1] if seen else "", 3):
        seen += [e.id for e in page]
    assert len(seen) == 7 and set(seen) == ids


def test_a_restart_keeps_everything(tmp_path, clock):
    first = SegmentRegistry(tmp_path, NAMESPACE, clock)
    entry = first.add("me", Place.INTERIOR, [1, 2], text="ab", key=KEY)
    first.set_pinned("me", entry.id, True)
    clock.now = 2000
    first.content("me", entry.id)
    path = first.path
    first.close()
    second = SegmentRegistry(tmp_path, NAMESPACE, clock)
    found = second.get("me", entry.id)
    assert found.pinned and found.key == KEY and found.last_used == 2000
    assert second.content("me", entry.id).text == "ab"
    assert second.set_aside is None and second.path == path
    second.close()
    assert os.stat(path).st_mode & 0o077 == 0, "texts of tenants are for this user alone"
    # The registry lives beside the first disk tier.
    memory = {"type": "memory", "bytes": "1MB"}
    disks = [{"type": "disk", "path": f"{tmp_path}/{n}", "bytes": "1MB", "name": n} for n in ("a", "b")]
    assert registry_folder(StoreConfig.from_mapping({"tiers": [memory]})) is None
    assert registry_folder(StoreConfig.from_mapping({"tiers": [memory, *disks]})) == tmp_path / "a"


def test_a_killed_process_loses_no_answered_change(tmp_path):
    """Killed while it writes, again and again: what was told is there, and the file is sound."""
    program = textwrap.dedent("""
        import sys
        from itertools import count
        from pathlib import Path
        from vllm_hypic.cache_api.registry import SegmentRegistry, Place
        registry = SegmentRegistry(Path(sys.argv[1]), sys.argv[3])
        for i in count():
            entry = registry.add("me", Place.INTERIOR, [int(sys.argv[2]), i] * 500)
            registry.set_pinned("me", entry.id, True)
            print(entry.id, flush=True)
    """)
    told: list[str] = []
    for run in range(4):
        command = [sys.executable, "-c", program, str(tmp_path), str(run), NAMESPACE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            told += [process.stdout.readline().strip() for _ in range(20 + run)]
            process.kill()
            told += [line.strip() for line in process.stdout if line.endswith("\n")]
    registry = SegmentRegistry(tmp_path, NAMESPACE)
    assert registry.set_aside is None
    assert registry._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert len(told) >= 86 and all(told)
    assert all((entry := registry.get("me", i)) is not None and entry.pinned for i in told)
    registry.close()


def test_files_that_are_damaged_newer_or_unwritable(tmp_path):
    SegmentRegistry(tmp_path, NAMESPACE).close()
    [path] = tmp_path.glob("*.sqlite")
    path.write_bytes(b"this is no database" * 100)
    registry = SegmentRegistry(tmp_path, NAMESPACE)
    assert registry.set_aside is not None and registry.set_aside.read_bytes().startswith(b"this is no")
    assert registry.get("me", registry.add("me", Place.INTERIOR, [1]).id) is not None
    registry.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(RegistryError, match=r"version 99; this program reads up to 1"):
        SegmentRegistry(tmp_path, NAMESPACE)
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match=r"/file"):
        SegmentRegistry(tmp_path / "file", NAMESPACE)


ENGINE = textwrap.dedent("""
    import sys
    from pathlib import Path
    from vllm_hypic.cache_api.registry import Place, SegmentRegistry
    registry = SegmentRegistry(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        match line.split():
            case ["add", number]:
                print(registry.add("me", Place.INTERIOR, [int(number)]).id, flush=True)
            case ["has", segment_id]:
                print(registry.get("me", segment_id) is not None, flush=True)
            case ["begin"]:
                registry._db.execute("BEGIN IMMEDIATE")
                print("begun", flush=True)
""")


@contextmanager
def engine(folder: Path) -> Iterator[Callable[[str], str]]:
    """Another engine's registry, in a process of its own: a line to it, a line back.  Killed at the end."""
    command = [sys.executable, "-c", ENGINE, str(folder), NAMESPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(line: str) -> str:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            yield ask
        finally:
            process.kill()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[SegmentRegistry]:
    with closing(SegmentRegistry(tmp_path, NAMESPACE, lambda: 1000.0)) as registry:
        yield registry


@pytest.mark.parametrize("namespace", [NAMESPACE, "cd" * 32], ids=["same model", "another model"])
def test_pins_and_expiries_are_the_engines_own(mine: SegmentRegistry, tmp_path: Path, namespace: str) -> None:
    """Another engine neither pins what was pinned here, nor takes what has expired here."""
    entry = mine.add("me", Place.INTERIOR, [1], key=KEY)
    mine.set_pinned("me", entry.id, True)
    mine.set_expires("me", entry.id, 1500.0)
    with closing(SegmentRegistry(tmp_path, namespace, lambda: 2000.0)) as other:
        assert (list(other.claimed()), other.take_expired(), len(other)) == ([], [], 0)
        assert other.get("me", entry.id) is None
    assert list(mine.claimed()) == [KEY] and mine.get("me", entry.id) is not None


def test_no_engine_waits_for_another_or_shares_memory(mine: SegmentRegistry, tmp_path: Path) -> None:
    with engine(tmp_path) as ask:
        assert ask("begin") == "begun"  # stopped in the middle of a change
        entry = mine.add("me", Place.INTERIOR, [1])
    assert mine.get("me", entry.id) is not None
    # Network folders have none: SQLite would keep it in a file beside the registry's.
    assert {file.name.partition(".sqlite")[2] for file in tmp_path.glob("*.sqlite*")} == {"", "-wal"}


def test_a_file_that_a_living_engine_uses_is_not_set_aside(tmp_path: Path) -> None:
    with engine(tmp_path) as ask:
        told = [ask(f"add {i}") for i in range(3)]
        [path] = tmp_path.glob("*.sqlite")
        with path.open("r+b") as damaged:
            damaged.write(b"garbage!" * 16)
        with closing(SegmentRegistry(tmp_path, NAMESPACE)) as other:
            assert other.set_aside is None
        told.append(ask("add 9"))
        assert all(ask(f"has {segment_id}") == "True" for segment_id in told)


def test_an_operators_look_holds_up_one_command_at_most(tmp_path: Path) -> None:
    """SQLite's own lock is asked once, not waited for."""
    SegmentRegistry(tmp_path, NAMESPACE).close()
    [path] = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryError, match="database is locked"):
            SegmentRegistry(tmp_path, NAMESPACE)
    SegmentRegistry(tmp_path, NAMESPACE).close()


def test_every_engine_of_a_model_finds_a_file(tmp_path: Path) -> None:
    with ExitStack() as life:
        registries = [life.enter_context(closing(SegmentRegistry(tmp_path, NAMESPACE))) for _ in range(5)]
        paths = {registry.path for registry in registries}
    assert len(paths) == 5
    with closing(SegmentRegistry(tmp_path, NAMESPACE)) as again:
        assert again.path in paths


def segment(id: str = "one", *, resident: bool = True, stored: bool = False) -> Segment:
    what = {"id": id, "role": "interior", "place": Place.INTERIOR, "tokens": 4, "key": "k" * 64}
    when = {"created": 1.0, "last_used": 1.0, "expires": None}
    where = {"bytes": 100 if resident else 0, "resident": resident, "stored": stored}
    return Segment(**what, **when, **where, pinned=False)


def test_a_segment_is_resident_where_every_replica_has_it() -> None:
    both = joined(segment(), [segment(stored=True)])
    assert isinstance(both, Segment) and both.resident and both.stored and both.bytes == 200
    one = joined(segment(), [segment(resident=False)])
    assert isinstance(one, Segment) and not one.resident and one.bytes == 100
    behind = joined(segment(), [Failure(404, "unknown")])
    assert isinstance(behind, Segment) and not behind.resident
    refused = Failure(409, "cannot be pinned", "one")
    assert joined(segment(), [segment(), refused]) == refused


def test_pages_are_those_of_the_first() -> None:
    first = SegmentPage([segment("a"), segment("b")], "b")
    page = joined(first, [SegmentPage([segment("b"), segment("c")], None)])
    assert isinstance(page, SegmentPage) and page.next == "b"
    assert [(s.id, s.resident) for s in page.segments] == [("a", False), ("b", True)]


def test_numbers_add_up_but_for_a_tier_that_is_down() -> None:
    def stats(up: float) -> CacheStats:
        return CacheStats({"disk": {"hits": 2.0, "up": up}}, 3, "file")

    found = joined(stats(1.0), [stats(0.0)])
    assert isinstance(found, CacheStats) and found.segments == 3
    assert found.tiers == {"disk": {"hits": 4.0, "up": 0.0}}


def test_a_registry_takes_the_id_that_the_first_replica_gave() -> None:
    registry = SegmentRegistry(None, NAMESPACE)
    own = registry.add("owner", Place.INTERIOR, [1, 2, 3])
    given = registry.add("owner", Place.INTERIOR, [1, 2, 3], segment_id="given")
    assert given.id == "given" and registry.get("owner", own.id) is None and len(registry) == 1
    assert registry.add("owner", Place.INTERIOR, [1, 2, 3]).id == "given"
    assert registry.add("owner", Place.INTERIOR, [4], segment_id="new").id == "new"


def test_every_replica_gets_its_own_file_again(tmp_path: Path) -> None:
    def paths(*replicas: int) -> list[Path]:
        with ExitStack() as life:
            opened = [SegmentRegistry(tmp_path, NAMESPACE, replica=n) for n in replicas]
            return [life.enter_context(closing(registry)).path for registry in opened]

    first = paths(1, 0)
    assert paths(0, 1, 2)[:2] == first[::-1]
