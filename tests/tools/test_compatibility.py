"""The page of what works beside this plugin names tests and messages; and what `make compat` compares."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compatibility_table as table  # noqa: E402
from vllm_seams import Seam, Sources, changes, seams  # noqa: E402

FIELDS = [
    pytest.param(feature[column], id=f"{feature['name']}-{column}")
    for feature in table.load()["feature"]
    for column in table.COLUMNS
]


def test_the_page_is_that_of_the_data() -> None:
    assert (ROOT / "docs" / "reference" / "compatibility.md").read_text("utf-8") == table.page(
        table.load()
    ), "run tools/compatibility_table.py --write docs/reference/compatibility.md"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_names_what_there_is(field: dict[str, str], messages: str) -> None:
    ((kind, what),) = field.items()
    assert kind in table.KINDS
    if kind in ("engine", "driven"):
        file, name = what.split("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    if kind == "refused":
        assert what in messages


@pytest.fixture(scope="module")
def messages() -> str:
    """Every string of the package, pieces of f-strings joined."""
    found = []
    for file in (ROOT / "vllm_hypic").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                pieces = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(str(piece) for piece in pieces))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


OURS = """
import vllm.envs as envs
from vllm.base import Base, gone, helper as used
from vllm.again import moved

class Mine(Base):
    def replaced(self): return self.called() + envs.ONE
    def own(self): return moved(used())
"""
BASE = """
class Root:
    def called(self, a: int = 1): return a
class Base(Root):
    def replaced(self): return 1
    def unused(self): return 1
def gone(): ...
def helper(): return 1
def moved(): ...
"""


def write(root: Path, **files: str) -> Path:
    """vLLM's modules, which say something else than usual in ``files``."""
    usual = {"base": BASE, "again": "from .base import moved", "envs": "ONE: int = 1"}
    for name, text in (usual | files).items():
        path = root / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old")


@pytest.fixture
def ours(tmp_path: Path, old: Path) -> list[Seam]:
    package = tmp_path / "package"
    package.mkdir()
    (package / "mine.py").write_text(OURS)
    return seams(package, Sources(old))


def test_what_we_rest_on(ours: list[Seam]) -> None:
    assert {seam.name: seam.body_counts for seam in ours} == {
        "vllm.again.moved": False,
        "vllm.base.Base": False,
        "vllm.base.Base.called": False,
        "vllm.base.Base.replaced": True,
        "vllm.base.gone": False,
        "vllm.base.helper": False,
        "vllm.envs.ONE": False,
    }


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ("", "# a comment\n", []),
        ("def gone(): ...", "", [("vllm.base.gone", "gone", "")]),
        ("a: int = 1)", "a: str = 2, b=3)", [("vllm.base.Base.called", "signature", "- a=1, + a=2, + b=3")]),
        ("replaced(self): return 1", "replaced(self): return 2", [("vllm.base.Base.replaced", "body", "")]),
        ("def unused(self): return 1", "", []),
        ("def helper(): return 1", "def helper(): return 2", []),
        ("class Root:", "class Root:\n    x: int", []),
    ],
)
def test_what_moved(was: str, now: str, expected: list, ours: list[Seam], old: Path, tmp_path: Path) -> None:
    new = write(tmp_path / "new", base=BASE.replace(was, now, 1))
    found = changes(ours, Sources(old), Sources(new))
    assert [(c.seam.name, c.kind, c.detail) for c in found] == expected


def test_a_name_that_came_by_another_module_is_followed(ours: list[Seam], old: Path, tmp_path: Path) -> None:
    new = write(tmp_path / "new", again="")
    assert [c.seam.name for c in changes(ours, Sources(old), Sources(new))] == ["vllm.again.moved"]
