"""Who may import whom: the table in CONTRIBUTING.md ("Layers"), read against every import of the code.

The engine and vLLM's connector call the scheduler half by its facade alone.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_hypic"
HEAVY = {"torch", "vllm", "triton", "matplotlib"}
"""Packages of others that the table is about."""

LAZILY = {
    ("vllm_hypic", "vllm"): "the entry point that vLLM calls registers names and patches",
    ("vllm_hypic", "engine.tokenizer"): "likewise",
    ("vllm_hypic", "patches"): "likewise",
    ("vllm_hypic", "models"): "likewise",
    ("store.tiers.lmcache_objects", "torch"): "LMCache's memory objects are tensors",
    ("pool.geometry", "vllm"): "what a layer caches is told by the classes of vLLM's cache specifications",
    ("patches", "engine"): "a patch of vLLM calls the engine where vLLM calls the patch",
    ("patches", "backends.linear"): "a patch puts a layer of ours where vLLM's does not run",
    ("engine.activation", "eval.gate.startup"): "an engine that starts looks for its model's sign-off",
    ("harness.engine_calls", "engine.renderer"): "called in the engine's process: a chat request",
    ("harness.engine_calls", "engine.segments"): "likewise: where segments are found",
    ("harness.engine_calls", "patches"): "likewise: of a stock engine that does not run without",
    ("harness.engine_calls", "models"): "likewise",
    ("eval.gate.identity", "vllm_hypic"): "the plugin's version",
    ("eval.gate.identity", "vllm"): "called in the engine's process, which has loaded vLLM",
    ("eval.gate.identity", "pool.states"): "the types in which records are stored; called by the engine",
}
"""Imports allowed inside functions only, and why: (module or folder, what it imports)."""


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    line: int
    in_function: bool
    for_types: bool
    """Stands under ``if TYPE_CHECKING``."""

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def test_every_import_is_in_the_table() -> None:
    assert not [str(one) for one in violations(modules())]


def test_no_module_imports_itself_by_others() -> None:
    assert cycle(modules()) is None


def test_every_exception_is_needed() -> None:
    found = [(name_of(i.module), i.target) for i in imports(modules()) if not i.for_types]
    for source, target in LAZILY:
        assert any(within(m, source) and within(name_of(t), target) for m, t in found), (source, target)


def test_every_folder_is_in_the_table() -> None:
    ours = {p.parent.name for p in (ROOT / PACKAGE).glob("*/__init__.py")}
    ours |= {p.stem for p in (ROOT / PACKAGE).glob("*.py")} - {"__init__"}
    there = {name_of(module) for module in modules()}
    assert ours <= set(layers()), ours - set(layers())
    assert set(layers()) <= there, set(layers()) - there


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("primitives.planted", "import torch"),
        ("primitives.planted", "def f():\n    from vllm.config import VllmConfig"),
        ("primitives.planted", "from ..pool import plans"),
        ("store.planted", "from vllm_hypic.primitives.keys import SegmentKey"),
        ("store.planted", "from ..config.engine import HypicConfig"),
        ("store.tiers.lmcache_objects", "import torch"),
        ("config.planted", "if TYPE_CHECKING:\n    from ..eval import gate"),
        ("segment_parallel.planted", "def f():\n    import vllm_hypic.connector.build"),
        ("backends.planted", "from ..connector import metadata"),
        ("backends.ops.planted", "from vllm import config"),
        ("backends.ops.planted", "from ..linear import layout"),
        ("tune.planted", "import torch; import vllm"),
        ("patches.planted", "from ..engine import activation"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations({f"{PACKAGE}.{module}": Module(source, is_package=False)})) == 1


def test_imports_for_types_alone_load_nothing() -> None:
    source = "if TYPE_CHECKING:\n    from vllm.config import VllmConfig"
    assert not violations({f"{PACKAGE}.primitives.planted": Module(source, is_package=False)})


@pytest.mark.parametrize("source", ["from .beta import b", "def f():\n    from . import beta"])
def test_a_planted_cycle_is_found(source: str) -> None:
    planted = {
        f"{PACKAGE}.pool.alpha": Module(source, is_package=False),
        f"{PACKAGE}.pool.beta": Module("import vllm_hypic.pool.gamma", is_package=False),
        f"{PACKAGE}.pool.gamma": Module("from .alpha import a", is_package=False),
    }
    found = cycle(planted)
    assert found is not None and set(found) == set(planted)
    del planted[f"{PACKAGE}.pool.gamma"]
    assert cycle(planted) is None


@dataclass(frozen=True)
class Module:
    source: str
    is_package: bool


FACADE = f"{PACKAGE}.connector.scheduler.connector"
DATA = {"config", "geometry", "namespace", "ids"}
"""Attributes of the scheduler half that are values, not collaborators."""
OWNERS = {"hypic", "side", "_side", "scheduler"}
"""Names under which the engine and vLLM's connector hold the scheduler half."""


def test_the_engine_calls_the_scheduler_half_by_its_facade() -> None:
    assert not list(behind_the_facade(modules()))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.planted", "def f(self):\n    self.hypic.directory.watch()"),
        ("engine.planted", "def f(side):\n    return side.planner.limits"),
        ("connector.connector", "def f(self):\n    self.scheduler.generated.expect('r', 1)"),
    ],
)
def test_a_planted_call_behind_the_facade_is_found(module: str, source: str) -> None:
    name = f"{PACKAGE}.{module}"
    planted = {name: Module(source, is_package=False), FACADE: modules()[FACADE]}
    assert len(list(behind_the_facade(planted))) == 1


def behind_the_facade(code: Mapping[str, Module]) -> Iterator[str]:
    """Places where the engine or vLLM's connector uses an attribute of one of the facade's collaborators."""
    stores = (n for n in ast.walk(ast.parse(code[FACADE].source)) if isinstance(n, ast.Attribute))
    parts = {n.attr for n in stores if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"} - DATA
    assert {"directory", "planner", "generated"} <= parts
    for name, module in code.items():
        if within(name_of(name), "engine") or name_of(name) == "connector.connector":
            for node in ast.walk(ast.parse(module.source)):
                if isinstance(node, ast.Attribute) and isinstance(part := node.value, ast.Attribute):
                    owner = ast.unparse(part.value).rpartition(".")[2]
                    if owner in OWNERS and part.attr in parts:
                        yield f"{name}:{node.lineno} uses {ast.unparse(node)}"


def modules() -> dict[str, Module]:
    """Every module of the package and of the benchmarks, by its full name."""
    found = {}
    for path in sorted(p for top in (PACKAGE, "benchmarks") for p in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found[".".join(parts[:-1] if is_package else parts)] = Module(path.read_text(), is_package)
    assert len(found) > 200
    return found


def layers() -> dict[str, frozenset[str]]:
    """What each folder may import, from CONTRIBUTING.md; no row names one below it."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    found: dict[str, frozenset[str]] = {}
    for folders, _, ours, others in rows:
        allowed = set(quoted(ours))
        assert all(any(within(name, folder) for folder in found) for name in allowed), (folders, ours)
        if "all of the above" in ours:
            allowed |= set(found)
        for folder in quoted(folders):
            found[folder] = frozenset(allowed | {other.lower() for other in quoted(others)})
    return found


def quoted(cell: str) -> list[str]:
    """The names between backticks, written as modules: ``backends/ops/`` is ``backends.ops``."""
    return [name.removesuffix(".py").strip("/").replace("/", ".") for name in cell.split("`")[1::2]]


def violations(code: Mapping[str, Module]) -> list[Import]:
    """Imports that the table does not allow."""
    table = layers()
    return [one for one in imports(code) if not allowed(one, table)]


def allowed(one: Import, table: Mapping[str, frozenset[str]]) -> bool:
    module, target = name_of(one.module), name_of(one.target)
    if (target.split(".")[0] in HEAVY and one.for_types) or (one.in_function and excepted(one)):
        return True
    row = max((folder for folder in table if within(module, folder)), key=len, default=None)
    return row is not None and any(within(target, folder) for folder in (row, *table[row]))


def excepted(one: Import) -> bool:
    module, target = name_of(one.module), name_of(one.target)
    return any(within(module, source) and within(target, there) for source, there in LAZILY)


def name_of(module: str) -> str:
    """The name by which the table knows a module: without the package's."""
    return module.removeprefix(f"{PACKAGE}.")


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def cycle(code: Mapping[str, Module]) -> list[str] | None:
    """Modules that import each other in a circle, when all their imports have run."""
    graph: dict[str, set[str]] = {}
    for one in imports(code):
        if one.target in code and not one.for_types and not (one.in_function and excepted(one)):
            graph.setdefault(one.module, set()).add(one.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return None


def imports(code: Mapping[str, Module]) -> Iterator[Import]:
    """Imports of our modules and of ``HEAVY`` ones, wherever they stand in a module."""
    for name, module in code.items():
        for node, in_function, for_types in statements(ast.parse(module.source)):
            for target in targets(node, name, module.is_package, code):
                ours = target.split(".")[0] in (PACKAGE, "benchmarks")
                if target != name and (ours or target.split(".")[0] in HEAVY):
                    yield Import(name, target, node.lineno, in_function, for_types)


Statement = ast.Import | ast.ImportFrom


def statements(
    node: ast.AST, in_function: bool = False, for_types: bool = False
) -> Iterator[tuple[Statement, bool, bool]]:
    if isinstance(node, Statement):
        yield node, in_function, for_types
    in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from statements(child, in_function, True)
        for child in node.orelse:
            yield from statements(child, in_function, for_types)
        return
    for child in ast.iter_child_nodes(node):
        yield from statements(child, in_function, for_types)


def targets(node: Statement, name: str, is_package: bool, code: Mapping[str, Module]) -> list[str]:
    """Full names of the modules that a statement in module ``name`` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = name.split(".")
        above = parts[: len(parts) - node.level + is_package]
        base = ".".join([*above, base] if base else above)
    return list(dict.fromkeys(f"{base}.{a.name}" if f"{base}.{a.name}" in code else base for a in node.names))
