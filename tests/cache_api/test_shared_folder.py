"""Engines that share a folder: each has a segment registry of its own there; none harms or awaits another."""

import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from vllm_hypic.cache_api.answers import Place
from vllm_hypic.cache_api.registry import RegistryError, SegmentRegistry
from vllm_hypic.primitives.keys import SegmentKey

MINE, OTHERS = "ab" * 32, "cd" * 32
KEY = SegmentKey("k" * 64)

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

Ask = Callable[[str], str]


@contextmanager
def engine(folder: Path, namespace: str = MINE) -> Iterator[Ask]:
    """Another engine's registry, in a process of its own: a line to it, a line back.  Killed at the end."""
    command = [sys.executable, "-c", ENGINE, str(folder), namespace]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def ask(line: str) -> str:
            stdin.write(line + "\n")
            stdin.flush()
            return stdout.readline().strip()

        try:
            yield ask
        finally:
            process.kill()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[SegmentRegistry]:
    registry = SegmentRegistry(tmp_path, MINE, lambda: 1000.0)
    yield registry
    registry.close()


@pytest.mark.parametrize("namespace", [MINE, OTHERS], ids=["same model", "another model"])
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
    # One is stopped in the middle of a change.
    with engine(tmp_path) as ask:
        assert ask("begin") == "begun"
        entry = mine.add("me", Place.INTERIOR, [1])
    assert mine.get("me", entry.id) is not None
    # Network folders have none: SQLite would keep it in a file beside the registry's.
    names = {file.name.partition(".sqlite")[2] for file in tmp_path.glob("*.sqlite*")}
    assert names == {"", "-wal"}


def test_a_file_that_a_living_engine_uses_is_not_set_aside(tmp_path: Path) -> None:
    with engine(tmp_path) as ask:
        told = [ask(f"add {i}") for i in range(3)]
        for file in tmp_path.glob("*.sqlite"):
            with file.open("r+b") as damaged:
                damaged.write(b"garbage!" * 16)
        with closing(SegmentRegistry(tmp_path, MINE)) as other:
            assert other.set_aside is None
        told.append(ask("add 9"))
        assert all(ask(f"has {segment_id}") == "True" for segment_id in told)


def test_an_operators_look_holds_up_one_command_at_most(tmp_path: Path) -> None:
    """SQLite's own lock is asked once, not waited for."""
    SegmentRegistry(tmp_path, MINE).close()
    [path] = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(path, isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryError, match="database is locked"):
            SegmentRegistry(tmp_path, MINE)
    SegmentRegistry(tmp_path, MINE).close()


def test_every_engine_of_a_model_finds_a_file(tmp_path: Path) -> None:
    with ExitStack() as life:
        registries = [life.enter_context(closing(SegmentRegistry(tmp_path, MINE))) for _ in range(5)]
        paths = {registry.path for registry in registries}
    assert len(paths) == 5
    with closing(SegmentRegistry(tmp_path, MINE)) as again:
        assert again.path in paths
