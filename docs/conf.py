"""The documentation site: ``make docs``.  Pages are this folder's Markdown files; the page of the Python API
is made from docstrings, without importing anything."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "vllm-hypic"
extensions = ["myst_parser", "autoapi.extension", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Only reference/python.md shows modules: what programs import.
autoapi_dirs = ["../vllm_hypic"]
autoapi_file_patterns = ["builder.py", "client.py"]
autoapi_generate_api_docs = False
autoapi_options = ["members"]
# Docstrings are written for readers of the code, not for docutils.
suppress_warnings = ["autoapi.python_import_resolution", "docutils", "ref.python"]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    """The first page begins with the README.  Links to files of the repository beside ``docs/``, which are no
    pages of the site, become plain text; one whose file does not exist stays, and fails the build."""
    folder = (ROOT / "docs" / docname).parent
    if docname == "index":
        source[0] = (ROOT / "README.md").read_text().replace("](docs/", "](") + source[0]
        folder = ROOT

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2].partition("#")[0]).resolve()
        inside = target.is_relative_to(ROOT / "docs") and target.is_file()
        return found[0] if inside or not target.exists() else found[1]

    source[0] = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", link, source[0])
