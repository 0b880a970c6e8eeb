"""Documents name what exists: files, folders and modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs", "docs/*", "csrc", "vllm_hypic/*", "examples/models/*")
DOCUMENTS = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.md".lstrip("/")))]
OUTPUT = {"build/docs"}  # what make targets make

NAMED = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*/?)`")
IN_TREE = re.compile(
    r"(?<![\w./-])(?:vllm_hypic|benchmarks|tests|docs|examples|csrc|tools)/[\w./-]*[\w/]|\btools/[\w.]+\.py"
)
MODULE = re.compile(r"(?<![\w.])vllm_hypic((?:\.[a-z]\w*)+)")


def wrong_paths(document: Path) -> list[str]:
    """Paths that do not exist, seen from the repository, the package, or the document's folder.  A file's
    name alone may also follow its folder, in the same paragraph."""
    wrong = []
    seen_from = [ROOT, ROOT / "vllm_hypic", document.parent]
    for paragraph in document.read_text().split("\n\n"):
        named = [p for p in NAMED.findall(paragraph) if "/" in p or p.endswith((".py", ".md"))]
        found = [f for p in named if "/" in p for root in seen_from for f in root.glob(p.rstrip("/"))]
        folders = [f if f.is_dir() else f.parent for f in found]
        for path in named + IN_TREE.findall(paragraph):
            names = [path.rstrip("/") + suffix for suffix in ("", ".py", ".md")]
            exists = any(list(root.glob(name)) for root in seen_from for name in names)
            follows = "/" not in path and any(list(f.rglob(path)) for f in folders)
            if not exists and not follows and path not in OUTPUT:
                wrong.append(path)
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_what_is_named_exists(document):
    text = document.read_text()
    assert wrong_paths(document) == []
    dotted = [m.replace(".", "/") for m in MODULE.findall(text)]
    package = ROOT / "vllm_hypic"
    assert [
        m for m in dotted if not (Path(f"{package}{m}").is_dir() or Path(f"{package}{m}.py").is_file())
    ] == []


def test_planted_faults_are_found(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("`engine/worker.py`, `worker.py`, `pool/`\n\n`worker.py` `gone/x`\n")
    assert wrong_paths(document) == ["worker.py", "gone/x"]
