"""The registry of compiled segments."""

import os
import re
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from vllm_hypic.cache_api.answers import Place
from vllm_hypic.cache_api.registry import RegistryError, SegmentRegistry
from vllm_hypic.cache_api.registry_file import registry_folder
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
    # Content comes back.
    tokens = [0, 7, 250_000, 2**24 - 1]
    entry = registry.add("me", Place.PROMPT, tokens, bare_from=1)
    content = registry.content("me", entry.id)
    found = (content.place, content.tokens, content.text, content.bare_from)
    assert found == (Place.PROMPT, tuple(tokens), None, 1)
    assert entry.n_tokens == 4
    # Ids are long and random.
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
    assert [e.id for e in registry.page("me", "", 10)] == [stays.id]
    assert registry.claims(KEY) == []
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
            assert process.stdout is not None
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
    # A damaged file is set aside.
    SegmentRegistry(tmp_path, NAMESPACE).close()
    [path] = tmp_path.glob("*.sqlite")
    path.write_bytes(b"this is no database" * 100)
    registry = SegmentRegistry(tmp_path, NAMESPACE)
    assert registry.set_aside is not None and registry.set_aside.read_bytes().startswith(b"this is no")
    entry = registry.add("me", Place.INTERIOR, [1])
    assert registry.get("me", entry.id) is not None
    registry.close()
    # A newer file is left alone.
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(RegistryError, match=r"version 99; this program reads up to 1"):
        SegmentRegistry(tmp_path, NAMESPACE)
    # A folder that cannot be written is told.
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match=r"/file"):
        SegmentRegistry(tmp_path / "file", NAMESPACE)
