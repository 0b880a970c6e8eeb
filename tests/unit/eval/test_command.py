"""``python -m benchmarks.answers``: what it refuses, and one run on the demo model."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.answers.command import main
from benchmarks.answers.tasks.families import FAMILIES
from vllm_hypic.harness.generators import EXAMPLE


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_help_names_the_families() -> None:
    found = run("--help")
    assert found.exit_code == 0
    for name, family in FAMILIES.items():
        assert f"{name:10} {family.about}" in found.output
    assert "--size" not in found.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "one,nine"], "'nine' is not a family of tasks: expected one, two, head"),
        (["--tasks", "one,one"], "expected different names"),
        (["--methods", "full,hpic-4"], "'hpic-4' is not a method: expected full, prefix, prefix-same,"),
        (["--methods", "hypic"], "'hypic' is not a method"),
        (["--methods", "hypic-9999"], "'hypic-9999' is not a method"),
        (["--prompts", "0"], "0 is not in the range"),
        (["--noise-chunk", "16"], "16 is not in the range"),
        (["--size", "150m"], "--size: a random model has no answers"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--outcomes", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--plot", "x.pdf"], "plots are PNG files"),
        (["--chat-template-kwargs", "{"], "'{' is not JSON"),
        (["--chat", "--chat-template-kwargs", "[1]"], "'[1]': expected a JSON object"),
        (["--chat-template-kwargs", '{"a": 1}'], "the model has no chat template, or --no-chat is given"),
        (["--data", "/nowhere/x.jsonl"], "does not exist"),
        (["--data", __file__], "line 1: not JSON"),
        (["--tasks", "one", "--facts", "1000"], "8 documents of 128 tokens: 1000 facts in a document"),
        (["--tasks", "one", "--documents", "200"], "200 documents: expected 2 to 100"),
    ],
)
def test_what_is_refused(arguments: Sequence[str], says: str) -> None:
    """Before any engine starts."""
    found = run(*arguments)
    assert found.exit_code == 2
    assert says in " ".join(found.output.replace("│", " ").split())


def test_families_and_generators_of_other_models(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "foreign")
    asked = ("--model", str(tmp_path / "foreign" / "model"), "--tasks", "one", "--facts", "1000")
    no = "'one' has no questions for this model"
    for arguments, says in (
        (["--model", str(tmp_path), "--tasks", "needle,one"], f"{no}; expected needle, keyvalue, variables"),
        (asked, no),
        ((*asked, "--trust-generator"), "8 documents of 128 tokens: 1000 facts in a document"),
    ):
        found = run(*arguments)
        assert found.exit_code == 2 and says in " ".join(found.output.split())


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_run_on_the_demo_model(tmp_path: Path) -> None:
    mine = {"input": "ent1 rel1", "context": "# w1 : ent1 rel1 val1 .\n" * 30, "answers": ["val1"]}
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps(mine) + "\n")
    names = {name: tmp_path / name for name in ("found.json", "found.png", "found.jsonl")}
    found = run(
        *("--tasks", "two", "--data", str(data), "--methods", "prefix,prefix-same,naive-8,block,hypic-8"),
        *("--prompts", "12", "--documents", "6", "--tokens", "96", "--ttft-repeats", "1"),
        *("--eager", "--threads", "1", "--kv-gib", "0.5"),
        *("--json", str(names["found.json"]), "--plot", str(names["found.png"])),
        *("--outcomes", str(names["found.jsonl"])),
    )
    assert found.exit_code == 0, found.output
    report = json.loads(names["found.json"].read_text())
    two, mine_result = report["results"]["families"]
    assert (two["family"], two["prompts"], two["left_out"]) == ("two", 12, 0)
    assert mine_result["family"] == "mine"
    cells = {cell["method"]: cell for cell in two["cells"]}
    full, noise = cells["full recompute"], cells["full recompute, chunks of 256"]
    assert list(cells)[:2] == [full["method"], noise["method"]]

    # Full recompute is itself, token by token and logprob by logprob, and mostly right.
    assert full["kl_worst"] == 0 and full["same_tokens"]["value"] == 100
    assert full["computed_tokens"] == full["prompt_tokens"]
    assert full["exact"]["mean"]["value"] > 60
    # vLLM's prefix cache has nothing of the documents in another order, and its first block in the same.
    assert cells["prefix caching"]["computed_tokens"] == full["prompt_tokens"]
    assert cells["prefix caching, same order"]["computed_tokens"] == full["prompt_tokens"] - 512
    # Another engine cuts its prompts into other chunks, and gives nearly the same.
    assert 0 < noise["kl_worst"] < 0.05
    # What is reused is nearly that; what leaves out transitions is not.
    assert cells["hypic-8"]["same_tokens"]["value"] > 80
    assert cells["hypic-8"]["kl_mean"]["value"] < 0.1 * cells["naive-8"]["kl_mean"]["value"]
    seams = 6 * 2 * 8
    for method, beside in (("hypic-8", seams), ("naive-8", seams), ("block", 0)):
        # The leading segment is too short to be cached.
        question_and_head = full["prompt_tokens"] - 6 * 96
        assert cells[method]["computed_tokens"] == beside + question_and_head
        assert cells[method]["reused_none"] == 0
    assert all(cell["first_token"] is not None for name, cell in cells.items() if name != noise["method"])

    assert report["command"].startswith("python -m benchmarks.answers")
    assert report["results"]["complete"]
    assert report["settings"]["seed"] == 0
    assert report["settings"]["shapes"] == {"two": [6, 96]}
    assert report["settings"]["model"] == EXAMPLE.name
    assert names["found.png"].read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in names["found.jsonl"].read_text().splitlines()]
    assert len(lines) == 13 * 7
    right = sum(x["exact"] for x in lines if x["method"] == "hypic-8" and x["family"] == "two")
    assert right == round(cells["hypic-8"]["exact"]["mean"]["value"] * 12 / 100)
    assert not list(tmp_path.glob("*.partial"))
    for title in ("two, 12 prompts", "mine, 1 prompts", "mean over 2 families"):
        assert title in found.output
