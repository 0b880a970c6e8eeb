"""The list of known faults fits this tree, and has some of every room; what ``tools/mutate.py`` does."""

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lib.unchanged import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mutate
from mutate import Mutation, MutationError, Part, parts, read_mutations

MUTATIONS = read_mutations()

LEAST = {
    **dict.fromkeys(("primitives", "pool", "connector", "store", "backends"), 3),
    **dict.fromkeys(("segment_parallel", "cache_api", "engine", "patches", "config"), 3),
    **dict.fromkeys(("connector/scheduler", "connector/worker", "segment_parallel/router"), 1),
    **dict.fromkeys(("backends/attention", "backends/linear", "backends/ops"), 1),
    **dict.fromkeys(("check", "suggest", "eval", "tune", "models", "harness"), 1),
}
"""Faults of each room of the package, at least."""


@cache
def names_in(file: str) -> frozenset[str]:
    """Functions that a test file has, or takes from others."""
    found = set[str]()
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_applies_once_and_its_tests_are_there(mutation: Mutation) -> None:
    assert mutation.file.startswith("vllm_hypic/") and mutation.file.endswith(".py")
    planted = mutation.planted((ROOT / mutation.file).read_text("utf-8"))
    ast.parse(planted)
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not function or function.partition("[")[0] in names_in(file), test


def test_names_are_different_and_short() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]*", name) for name in names)


def test_every_room_has_its_faults() -> None:
    files = [mutation.file for mutation in MUTATIONS]
    for room, least in LEAST.items():
        assert sum(file.startswith(f"vllm_hypic/{room}/") for file in files) >= least, room
    rooms = {folder.parent.name for folder in (ROOT / "vllm_hypic").glob("*/__init__.py")}
    assert rooms == {room for room in LEAST if "/" not in room}


def test_some_are_found_by_engines_alone() -> None:
    assert sum(all(t.startswith("tests/engine/") for t in m.tests) for m in MUTATIONS) >= 15


# -- the tool --------------------------------------------------------------------------------------------

ONE = Mutation("sign-flipped", "vllm_hypic/some.py", "a - b", "a + b", ("tests/test_some.py",))


def test_planting() -> None:
    assert ONE.planted("return a - b\n") == "return a + b\n"


@pytest.mark.parametrize(("text", "times"), [("return b - a\n", 0), ("a - b, a - b\n", 2)])
def test_a_fault_that_does_not_fit_is_named(text: str, times: int) -> None:
    with pytest.raises(MutationError, match=f"sign-flipped: its old text stands {times} times"):
        ONE.planted(text)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "sign-flipped: another fault has this name"),
        ({"name": "other", "new": "a - b"}, "other: expected a new text that differs"),
        ({"name": "two", "tests": []}, "two: expected a new text that differs from old, and at least one"),
        ({"name": "other", "lines": 3}, "other: expected name, file, old, new and tests"),
        ({"name": "", "tests": []}, "number 2: "),  # without a name
    ],
)
def test_a_list_that_makes_no_sense_is_refused(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    one = {**vars(ONE), "tests": list(ONE.tests)}
    entries = [one, {k: v for k, v in (one | more).items() if k != "name" or v}]
    lines = ["[[mutation]]\n" + "".join(f"{k} = {v!r}\n" for k, v in entry.items()) for entry in entries]
    (tmp_path / "list.toml").write_text("\n".join(lines))
    with pytest.raises(MutationError, match=says):
        read_mutations(tmp_path / "list.toml")


def test_triton_has_a_process_of_its_own() -> None:
    kernels, others = "tests/cuda/triton/test_merge.py", "tests/unit/pool/test_appended.py"
    interpreted = Part((kernels,), interpreted=True)
    assert parts([others]) == [Part((others,))]
    assert parts([others, kernels]) == [Part((others,)), interpreted]
    assert parts([kernels, others]) == [interpreted, Part((others,))]
    assert interpreted.environment == {"TRITON_INTERPRET": "1"} and not Part((others,)).environment
    whole, of_triton = parts(["tests"])
    assert whole.options == ("--ignore=tests/cuda/triton",)
    assert of_triton == Part(("tests/cuda/triton",), interpreted=True)


@pytest.mark.parametrize(
    ("code", "output", "outcome", "test"),
    [
        (0, "1 passed", mutate.SURVIVED, ""),
        (1, "FAILED tests/a.py::test_b[1-2] - assert 0\n", mutate.FOUND, "tests/a.py::test_b[1-2]"),
        (1, "ERROR tests/a.py::test_b - RuntimeError\n", mutate.FOUND, "tests/a.py::test_b"),
        (None, "", mutate.FOUND, ""),
        (-11, "", mutate.FOUND, ""),
        (5, "no tests ran", mutate.ERROR, ""),
        (2, "ERROR tests/a.py\n", mutate.FOUND, "tests/a.py"),
        (4, "ERROR: file or directory not found: tests/a.py\n", mutate.ERROR, ""),
    ],
)
def test_what_pytest_says(
    code: int | None, output: str, outcome: str, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be collected was broken by the fault, if it can be without."""
    runner = mutate.Runner("not slow", 900, whole=False)

    def pytest_run(copy: Path, part: Part, until: float, *more: str) -> tuple[int | None, str]:
        return (0 if code == 2 else code, "") if more else (code, output)

    monkeypatch.setattr(runner, "_pytest", pytest_run)
    monkeypatch.setattr(mutate, "_tracked", lambda: [])
    monkeypatch.setattr(mutate, "ROOT", Path("/nowhere"))
    found = runner._look(Path("/nowhere"), Part(("tests/a.py",)), 0.0)
    assert found[:2] == (outcome, test)
