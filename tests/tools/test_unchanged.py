"""Groups of tests that `make test` leaves out: what each depends on, and when it runs again."""

import json
from pathlib import Path

import pytest
from lib import unchanged
from lib.unchanged import GROUPS, ROOT, Group, group_of, left_out


@pytest.fixture
def passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(unchanged, "PASSED", tmp_path / "passed.json")
    monkeypatch.delenv(unchanged.RUN_ALL, raising=False)
    return tmp_path / "passed.json"


def test_every_group_names_what_is_there() -> None:
    for name, group in GROUPS.items():
        assert len(list(group.files())) > 10, name
        for path in (*group.tests, *group.depends):
            assert (ROOT / path).exists(), f"{name}: {path}"


def test_tests_belong_to_the_group_of_their_folder() -> None:
    assert group_of("tests/cuda/driven/test_device_rules.py::test_one") == "cuda"
    assert group_of("tests/unit/backends/test_instruction_sets.py::test_one") == "instruction sets"
    assert group_of("tests/unit/backends/test_join.py::test_one") is None
    assert group_of("tests/cudas/test_one.py::test_one") is None
    assert group_of("tests/engine/test_exactness.py::test_one[a/b]") is None


def test_a_group_is_left_out_until_one_of_its_files_changes(passed: Path) -> None:
    assert left_out() == set(), "no digest is on record yet"
    unchanged.write()
    assert left_out() == set(GROUPS)
    passed.write_text(json.dumps(json.loads(passed.read_text()) | {"cuda": "0" * 64}))
    assert left_out() == set(GROUPS) - {"cuda"}


def test_all_groups_run_where_that_is_asked_for(passed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged.write()
    monkeypatch.setenv(unchanged.RUN_ALL, "1")
    assert left_out() == set()


@pytest.mark.parametrize("change", ["content", "name", "new"])
def test_a_digest_is_of_names_and_contents(tmp_path: Path, change: str) -> None:
    shared = ("setup.py", "tests/engine/preloaded.py", "tests/lib/one.py")
    for name in ("tests/of/test_one.py", "package/one.py", *shared):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    group = Group(("tests/of",), ("package",))
    before = group.digest(tmp_path)
    (tmp_path / "package" / "one.pyc").write_text("compiled")
    (tmp_path / "elsewhere.py").write_text("of no group")
    assert group.digest(tmp_path) == before
    file = tmp_path / "package" / "one.py"
    if change == "content":
        file.write_text("other")
    elif change == "name":
        file.rename(file.with_name("two.py"))
    else:
        file.with_name("two.py").write_text("")
    assert group.digest(tmp_path) != before
