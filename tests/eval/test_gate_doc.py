"""The page on choosing settings says what holds: options, defaults, limits, exit codes, the key's parts."""

import dataclasses
import json
import re
from pathlib import Path

from vllm_hypic.config.gate import GateConfig
from vllm_hypic.eval.gate.choice import LADDER
from vllm_hypic.eval.gate.command import Exit, gate
from vllm_hypic.eval.gate.criteria import Limits
from vllm_hypic.eval.gate.fixed_set import DATA_WORDS, DEMO_DOCUMENTS, DEMO_TOKENS, TEXTS_SHARE
from vllm_hypic.eval.gate.identity import Subject
from vllm_hypic.eval.gate.measure import NOISE_CHUNK
from vllm_hypic.eval.gate.verdict import Verdict
from vllm_hypic.eval.tasks import continuations
from vllm_hypic.eval.tasks.families import CONTINUATIONS, QUESTIONS
from vllm_hypic.tune.prompts import HELD_OUT, LEAST_DOCUMENTS, NEEDED, PIECE_TOKENS, PIECES, QUERY_TOKENS

PATH = Path(__file__).parents[2] / "docs/how-to/choose-for-my-model.md"
TEXT = PATH.read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())
OPTIONS = {option: p for p in gate.params for option in (*p.opts, *p.secondary_opts)}


def rows(heading: str, first: str) -> list[list[str]]:
    """Cells of the table under a heading whose first heading cell is ``first``."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, heading
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section[1], re.MULTILINE)
    assert table, first
    return [[c.strip() for c in line[1:-1].split("|")] for line in table[1].splitlines()]


def test_limits_options_and_exit_codes() -> None:
    # Limits.
    told = {row[2].strip("`"): float(row[3].strip("`")) for row in rows("Criteria", "criterion")}
    defaults = {p.opts[0]: p.default for p in gate.params if p.name in vars(Limits())}
    assert told == defaults and len(told) == len(vars(Limits()))
    # Options of the server.
    told = {row[0].strip("`"): json.loads(row[1].strip("`")) for row in rows("At a server's start", "option")}
    assert told == dataclasses.asdict(GateConfig())
    # Options of the command exist.
    for option in re.findall(r"`(--[a-z-]+)", TEXT):
        assert option in OPTIONS or option in ("--help", "--additional-config"), option
    for name in ("--prompts", "--kv-gib"):
        assert f"{OPTIONS[name].default:g}" in PROSE
    # Exit codes.
    told = {int(row[0]): row[1] for row in rows("The command", "exit code")}
    assert sorted(told) == sorted(Exit)
    assert told[Exit.USAGE] == "usage" and told[Exit.CANNOT_JUDGE] == Verdict.CANNOT_JUDGE


def test_the_key_the_fixed_set_and_links() -> None:
    # What the key covers.
    told = [name for row in rows("The sign-off", "part") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(f.name for f in dataclasses.fields(Subject))
    # Sizes of the fixed set.
    assert f"{OPTIONS['--prompts'].default} questions" in PROSE and len(QUESTIONS) == 5
    assert f"{DEMO_DOCUMENTS} documents of {DEMO_TOKENS} tokens" in PROSE
    assert f"{continuations.TOKENS} tokens that follow" in PROSE and TEXTS_SHARE == 3
    assert all(f"(`{family}`)" in PROSE for family in CONTINUATIONS)
    assert f"at most {DATA_WORDS} words" in PROSE and f"({NOISE_CHUNK} tokens a step)" in PROSE

    # What is tried by --choose, and what a context is trained on.
    assert (
        f"cheapest go of {('', 'one', 'two', 'three', 'four', 'five', 'six', 'seven')[len(LADDER)]}" in PROSE
    )
    assert all(f"`{islands}`" in PROSE for _, islands in LADDER if islands != "none")
    assert f"{LEAST_DOCUMENTS} texts of {NEEDED} tokens or more" in PROSE and HELD_OUT == 5 and PIECES == 4
    assert f"four pieces of {PIECE_TOKENS} tokens" in PROSE and f"next {QUERY_TOKENS} tokens" in PROSE

    # Links lead somewhere.
    def anchors(text: str) -> set[str]:
        lines = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}

    for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXT):
        text = (PATH.parent / file).read_text(encoding="utf-8") if file else TEXT
        assert not anchor or anchor in anchors(text), anchor
