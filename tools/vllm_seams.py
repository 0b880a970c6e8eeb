"""What of vLLM this package rests on, and which of it another vLLM has changed.

Read from sources, nothing is imported.  A *seam* is a name of vLLM's that our code imports or reaches from
what it imports, a method of vLLM's that a class of ours overrides, or one that it calls on itself.  The
signature counts; of methods overridden and of what `patches/` touches the body, too, as ours stand in for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, order=True)
class Seam:
    """A name of vLLM's, ``vllm.module.Class.method``, and where we rest on it."""

    name: str
    body_counts: bool
    """Whether ours replaces or wraps it, so that a changed body matters."""
    where: str
    """File and line, relative to the package."""


@dataclass(frozen=True)
class Change:
    seam: Seam
    kind: str
    """``gone``, ``signature`` or ``body``."""
    detail: str


class Sources:
    """vLLM's Python files under ``root``, the folder that holds ``vllm/``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.module = cache(self._module)
        self.find = cache(self._find)

    def _module(self, name: str) -> ast.Module | None:
        path = self._root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text("utf-8"))
        return None

    def _find(self, name: str) -> tuple[str, ast.AST] | None:
        """The node that the dotted ``name`` stands for and the module that defines it, if there is one."""
        if (module := self.module(name)) is not None:
            return name, module
        owner, _, last = name.rpartition(".")
        if not owner or (found := self.find(owner)) is None:
            return None
        module_name, node = found
        if isinstance(node, ast.Module):
            return self._in_module(module_name, node, last)
        if isinstance(node, ast.ClassDef):
            return self._in_class(module_name, node, last)
        return None

    def _in_module(self, module_name: str, module: ast.Module, wanted: str) -> tuple[str, ast.AST] | None:
        for statement in _statements(module.body):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if statement.name == wanted:
                    return module_name, statement
                case ast.Assign() | ast.AnnAssign() if wanted in _targets(statement):
                    return module_name, statement
                case ast.ImportFrom():
                    for alias in statement.names:
                        if (alias.asname or alias.name) == wanted:
                            return self.find(f"{self._origin(module_name, statement)}.{alias.name}")
        return None

    def _in_class(self, module_name: str, owner: ast.ClassDef, wanted: str) -> tuple[str, ast.AST] | None:
        for statement in _statements(owner.body):
            if isinstance(statement, (*Function, ast.ClassDef)) and statement.name == wanted:
                return module_name, statement
            if isinstance(statement, ast.Assign | ast.AnnAssign) and wanted in _targets(statement):
                return module_name, statement
        for base in owner.bases:
            found = self.find(f"{module_name}.{ast.unparse(base)}")
            if found is None or not isinstance(found[1], ast.ClassDef):
                continue
            if (inherited := self._in_class(found[0], found[1], wanted)) is not None:
                return inherited
        return None

    def _origin(self, module_name: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = self._root.joinpath(*module_name.split("."), "__init__.py").is_file()
        parts = module_name.split(".")
        base = parts[: len(parts) - statement.level + is_package]
        return ".".join([*base, *([statement.module] if statement.module else [])])


def seams(package: Path, vllm: Sources) -> list[Seam]:
    """All seams of the Python files under ``package`` with the sources ``vllm`` that they are written for."""
    found: set[Seam] = set()
    for file in sorted(package.rglob("*.py")):
        found |= _Reader(file, package, vllm).seams()
    strictest: dict[str, Seam] = {}
    for seam in sorted(found):
        known = strictest.get(seam.name)
        if known is None or seam.body_counts > known.body_counts:
            strictest[seam.name] = seam
    return sorted(strictest.values())


def changes(all_seams: list[Seam], old: Sources, new: Sources) -> list[Change]:
    """Which of ``all_seams`` differ between two vLLMs; comments, docstrings and formatting do not count."""
    result = []
    for seam in all_seams:
        before, after = old.find(seam.name), new.find(seam.name)
        if before is None:
            continue
        if after is None:
            result.append(Change(seam, "gone", ""))
        elif (was := _signature(before[1])) != (now := _signature(after[1])):
            result.append(Change(seam, "signature", _difference(was, now)))
        elif seam.body_counts and _body(before[1]) != _body(after[1]):
            result.append(Change(seam, "body", ""))
    return result


def _difference(was: str, now: str) -> str:
    """The parameters or fields that came and went, or both signatures where only order or kind differs."""
    before, after = was.split(", "), now.split(", ")
    parts = [f"- {name}" for name in before if name not in after]
    parts += [f"+ {name}" for name in after if name not in before]
    return ", ".join(parts) or f"{was} -> {now}"


@dataclass
class _Reader:
    """The seams of one of our files."""

    file: Path
    package: Path
    vllm: Sources
    names: dict[str, str] = field(default_factory=dict)
    """What of vLLM's each local name stands for."""

    def seams(self) -> set[Seam]:
        tree = ast.parse(self.file.read_text("utf-8"))
        found: set[Seam] = set()
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(level=0, module=str(module)) if module.split(".")[0] == "vllm":
                    for alias in node.names:
                        self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
                        found |= self._seam(f"{module}.{alias.name}", node)
                case ast.Import():
                    for alias in node.names:
                        if alias.name.split(".")[0] == "vllm":
                            self.names[alias.asname or alias.name] = alias.name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= self._reached(node)
            elif isinstance(node, ast.ClassDef):
                found |= self._subclassed(node)
        return found

    def _seam(self, name: str, node: ast.stmt | ast.expr, body_counts: bool = False) -> set[Seam]:
        if self.vllm.find(name) is None:
            return set()
        relative = self.file.relative_to(self.package)
        patched = relative.parts[0] == "patches"
        return {Seam(name, body_counts or patched, f"{relative}:{node.lineno}")}

    def _reached(self, node: ast.Attribute) -> set[Seam]:
        first, _, rest = ast.unparse(node).partition(".")
        return self._seam(f"{self.names[first]}.{rest}", node) if first in self.names else set()

    def _subclassed(self, ours: ast.ClassDef) -> set[Seam]:
        found: set[Seam] = set()
        bases = [self.names[name] for base in ours.bases if (name := ast.unparse(base)) in self.names]
        for base in bases:
            for statement in ours.body:
                if isinstance(statement, Function) and statement.name != "__init__":
                    found |= self._seam(f"{base}.{statement.name}", statement, body_counts=True)
            for node in ast.walk(ours):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()"):
                    found |= self._seam(f"{base}.{node.attr}", node)
        return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` with them."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try):
                yield from _statements(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _signature(node: ast.AST) -> str:
    """How callers meet ``node``: a function's or constructor's parameters, fields, or just its kind."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            asynchronous = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            return f"{asynchronous}{_parameters(node.args)}"
        case ast.ClassDef():
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                    return _parameters(statement.args)
            fields = [_targets(s)[0] for s in node.body if isinstance(s, ast.AnnAssign) and _targets(s)]
            return ", ".join(fields)
        case ast.Assign() | ast.AnnAssign():
            return "value"
    return type(node).__name__


def _parameters(arguments: ast.arguments) -> str:
    """Names, order and defaults; annotations do not change what may be called."""
    bare = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)
    for node in ast.walk(bare.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(bare.args)


def _body(node: ast.AST) -> str:
    if not isinstance(node, Function):
        return ast.dump(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return "\n".join(ast.dump(statement) for statement in body)
