"""The generated pages of docs/reference are those of the code, and everything on them has a sentence."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from vllm_hypic.cli import main as cli
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.config.schema import ConfigSection, Natural, options
from vllm_hypic.connector.metrics import COUNTERS, GAUGES
from vllm_hypic.primitives.options import KNOWN, PERMIT, TRANSFER
from vllm_hypic.primitives.policies import CONTEXTS, METHODS

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "reference"
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402
from reference_text import MissingSentence, said  # noqa: E402


def test_the_pages_are_those_of_the_code() -> None:
    """In a process of its own, as modules that need vLLM have stand-ins there."""
    done = subprocess.run(
        [sys.executable, "tools/reference.py", "--check", "docs/reference"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr


def test_options_metrics_and_commands_are_all_there() -> None:
    text = (PAGES / "options.md").read_text().partition("\n## ")[0]
    rows = {line.split("`")[1]: line.replace("\\|", "|") for line in text.splitlines() if line[:3] == "| `"}
    assert list(rows) == [f.name for f in dataclasses.fields(HypicConfig)]
    defaults = HypicConfig().to_mapping()
    for name, row in rows.items():
        default = row.split(" | ")[2]
        if default != f"see [`{name}`](#{name})":
            assert json.loads(default.strip("`")) == defaults[name], name
    metrics = (PAGES / "metrics.md").read_text()
    for name in [*(f"{counter}_total" for counter in COUNTERS), *GAUGES]:
        assert f"| `vllm:hypic_{name}` |" in metrics, name
    commands = re.findall(r"^## `vllm-hypic (\w+)`", (PAGES / "commands.md").read_text(), re.MULTILINE)
    assert commands == cli.list_commands(click.Context(cli))


def test_the_page_of_requests_names_every_field_method_and_context() -> None:
    text = (PAGES / "request.md").read_text()
    for name in (*METHODS, *CONTEXTS, *(field for field in KNOWN if field not in (*TRANSFER, PERMIT))):
        assert f"| `{name}` |" in text, name


@options
class Planted(ConfigSection):
    """Options, of which one has no sentence."""

    length: Natural = 1
    """Length of something."""
    depth: Natural = 1


def test_an_option_without_a_sentence_is_found() -> None:
    with pytest.raises(MissingSentence, match=r"Planted\.depth: expected a sentence"):
        reference.options_table(Planted)


@pytest.mark.parametrize("text", ["", None, " ", "no full stop"])
def test_what_has_no_sentence_is_named(text: str | None) -> None:
    with pytest.raises(MissingSentence, match=r"^vllm-hypic check --json: expected"):
        said("vllm-hypic check --json", text)


def test_a_command_without_a_sentence_is_found() -> None:
    @click.command()
    @click.option("--silent", is_flag=True)
    def planted() -> None:
        """Do something."""

    with pytest.raises(MissingSentence, match="planted --silent"):
        list(reference._commands(planted, click.Context(planted, info_name="planted")))
