"""The command line of the gate, without engines: what they would measure is planted.

And the page on choosing settings says what holds: options, defaults, limits, exit codes, the key's parts.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from vllm_hypic.cli import main
from vllm_hypic.config.engine import GateConfig, HypicConfig
from vllm_hypic.eval.fitting import PoolError
from vllm_hypic.eval.gate import command
from vllm_hypic.eval.gate.command import Exit, gate
from vllm_hypic.eval.gate.criteria import Limits, Numbers, Verdict
from vllm_hypic.eval.gate.fixed_set import DATA_WORDS, DEMO_DOCUMENTS, DEMO_TOKENS, TEXTS_SHARE, TaskSet
from vllm_hypic.eval.gate.identity import Subject
from vllm_hypic.eval.gate.measure import NOISE_CHUNK, GateEngines, GateMeasurement, MeasureError
from vllm_hypic.eval.gate.signoff import FOLDER, SignOff, read
from vllm_hypic.eval.gate.startup import LADDER
from vllm_hypic.eval.methods import Method
from vllm_hypic.eval.scores import Metric
from vllm_hypic.eval.task import ChatTemplate
from vllm_hypic.eval.tasks.families import CONTINUATIONS, QUESTIONS
from vllm_hypic.eval.tasks.natural import TEXT_TOKENS
from vllm_hypic.harness.engines import EngineError
from vllm_hypic.harness.generators import EXAMPLE, Generator
from vllm_hypic.primitives.options import LinkDefaults
from vllm_hypic.tune.prompts import HELD_OUT, LEAST_DOCUMENTS, NEEDED, PIECE_TOKENS, PIECES, QUERY_TOKENS

from .gate_numbers import answers, numbers, subject

MODEL = str(EXAMPLE / "model")
GO, NO_GO = numbers(), numbers(answers=(answers(lost=14),))
CANNOT_JUDGE = numbers(answers=(answers(right=2),))


class Lab:
    """Stands in for the engines; remembers what it was given."""

    def __init__(self) -> None:
        self.found: Mapping[str, Numbers] | Exception = {}
        self.place: Any = None
        self.sets: Sequence[TaskSet] = ()
        self.template = ChatTemplate()

    def measure(
        self, place: GateEngines, methods: Sequence[Method], make: Any, *, chat: bool | None, **more: Any
    ) -> GateMeasurement:
        if isinstance(self.found, Exception):
            raise self.found
        self.place, self.sets, self.template = place, make(bool(chat)), more["template"]
        methods = [m.on(LinkDefaults("hypic", 8)) for m in methods]
        planted = {m: self.found.get(m.name, GO) for m in methods}
        return GateMeasurement(subject(), planted, bool(chat), 0, {"max_model_len": place.context})


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The user's own folder of sign-offs is left alone."""
    lab = Lab()
    monkeypatch.setenv(FOLDER, str(tmp_path_factory.mktemp("default")))
    monkeypatch.setattr(command, "measure", lab.measure)
    return lab


def run(*arguments: str) -> Result:
    """As a user would; an error is a message, never a traceback."""
    result = CliRunner().invoke(main, ["gate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def judged(folder: Path, *options: str, code: int = 0) -> str:
    """What the command says of the demo model, whose sign-offs go to ``folder``."""
    result = run(MODEL, "--folder", str(folder), *options)
    assert result.exit_code == code, result.output
    return result.output


def signed(folder: Path) -> SignOff:
    [path] = folder.iterdir()
    return read(path)


@pytest.mark.parametrize(
    ("planted", "verdict", "code"),
    [(GO, Verdict.GO, 0), (NO_GO, Verdict.NO_GO, 1), (CANNOT_JUDGE, Verdict.CANNOT_JUDGE, 3)],
)
def test_verdict_and_code(lab: Lab, tmp_path: Path, planted: Numbers, verdict: Verdict, code: int) -> None:
    lab.found = {"hypic-8": planted}
    output = judged(tmp_path, "--by", "Ada", code=code)
    [path] = tmp_path.iterdir()
    sign_off = read(path, subject())
    assert path.stem == subject().key
    assert sign_off.judgement.verdict is verdict and sign_off.by == "Ada"
    assert sign_off.model == "tiny-hybrid-qa"
    assert verdict.upper() in output.splitlines()
    said = "".join(output.split())
    for reason in sign_off.judgement.reasons:
        assert "".join(reason.says.split()) in said
    assert str(path) in output
    assert sign_off.evidence["numbers"]["answers"][0]["full"] == planted.answers[0].full
    assert {"tasks", "engine", "machine", "versions"} <= set(sign_off.evidence)


def test_a_foreign_models_generator_must_be_asked_for(lab: Lab, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "foreign")
    asked = (str(tmp_path / "foreign" / "model"), "--folder", str(tmp_path / "gates"), "--prompts", "8")
    run(*asked)
    assert "one" not in {task.family for s in lab.sets for task in s.tasks}
    run(*asked, "--trust-generator")
    assert "one" in {task.family for s in lab.sets for task in s.tasks}


def test_the_sign_off_is_of_what_will_be_served(lab: Lab, tmp_path: Path) -> None:
    options = {"link": "hypic", "min_segment_tokens": 16, "page_tokens": 32}
    judged(tmp_path, "--hypic", json.dumps(options), "--link", "naive", "--seam-tokens", "4")
    [path] = tmp_path.iterdir()
    served = HypicConfig.from_mapping({"link": "naive", "seam_tokens": 4, "min_segment_tokens": 16})
    assert read(path, subject(served)).judgement.verdict is Verdict.GO


def test_contexts_and_islands_are_judged_with_their_link(lab: Lab, tmp_path: Path) -> None:
    lab.found = {"hypic-8/lead/query-20": NO_GO}
    judged(tmp_path, "--context", "lead", "--islands", "query-20", code=1)
    options = signed(tmp_path).subject.options
    assert (options["context"], options["islands"]) == ("lead", "query-20")


def test_what_engines_are_given(lab: Lab, tmp_path: Path) -> None:
    """Their options, but no tiers, ports or sign-offs of the server's."""
    hypic = {
        "min_segment_tokens": 16,
        "store": {"tiers": [{"type": "disk", "path": "/nowhere", "bytes": 1}]},
        "segment_parallel": {"listen": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101"},
        "gate": {"require": "go"},
    }
    engine = {"quantization": "awq", "max_model_len": 4096}
    options = ("--engine-args", json.dumps(engine), "--threads", "1", "--kv-gib", "0.5")
    judged(tmp_path, "--hypic", json.dumps(hypic), "--dtype", "float32", "--eager", *options)
    assert lab.template.options == {"enable_thinking": False}, "answers are short"
    assert lab.place.more == {"dtype": "float32", "quantization": "awq", "max_model_len": 4096}
    given = lab.place.settings.arguments(lab.place.context, hypic=True, **lab.place.more)
    config = HypicConfig.from_mapping(given["additional_config"]["hypic"])
    assert config == HypicConfig.from_mapping({"min_segment_tokens": 16, "gate": {"require": "off"}})
    assert given["enforce_eager"] and given["max_model_len"] == 4096
    assert given["kv_cache_memory_bytes"] == 2**29


def test_the_narrowest_window_that_is_a_go(lab: Lab, tmp_path: Path) -> None:
    lab.found = {"hypic-0": NO_GO, "hypic-4": CANNOT_JUDGE}
    output = judged(tmp_path, "--try-seams", "16,0,8,4")
    assert "Recommended: seam_tokens=8, the narrowest window that is a go." in output
    verdicts = {s.subject.options["seam_tokens"]: s.judgement.verdict for s in map(read, tmp_path.iterdir())}
    assert verdicts == {0: Verdict.NO_GO, 4: Verdict.CANNOT_JUDGE, 8: Verdict.GO, 16: Verdict.GO}


@pytest.mark.parametrize(("other", "code"), [(NO_GO, 1), (CANNOT_JUDGE, 3)])
def test_no_window_is_a_go(lab: Lab, tmp_path: Path, other: Numbers, code: int) -> None:
    lab.found = {"hypic-0": NO_GO, "hypic-4": other}
    assert "No seam window that was tried is a go." in judged(tmp_path, "--try-seams", "0,4", code=code)


def test_the_cheapest_context_and_islands_that_are_a_go(lab: Lab, tmp_path: Path) -> None:
    lab.found = {"hypic-8": NO_GO, "hypic-8/text": CANNOT_JUDGE}
    said = " ".join(judged(tmp_path, "--choose").split())
    assert "Recommended: context='text', islands='query-5', the cheapest that are a go." in said
    tried = [read(path) for path in tmp_path.iterdir()]
    assert len(tried) == len(LADDER)
    served = subject(HypicConfig(context="text", islands="query-5"))
    [sign_off] = [s for s in tried if s.subject == served]
    assert sign_off.judgement.verdict is Verdict.GO
    names = ("/".join(part for part in ("hypic-8", *rung) if part != "none") for rung in LADDER)
    lab.found = dict.fromkeys(names, NO_GO)
    assert "No context and islands that were tried are a go" in judged(tmp_path, "--choose", code=1)


def test_limits_are_options(lab: Lab, tmp_path: Path) -> None:
    lab.found = {"hypic-8": NO_GO}
    judged(tmp_path, "--max-loss", "30", "--max-certain-loss", "30")
    assert signed(tmp_path).limits["loss"] == 30
    assert vars(Limits()).items() <= {p.name: p.default for p in gate.params}.items()


def test_where_sign_offs_go(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "default"))
    run(MODEL)
    assert read(tmp_path / "default" / f"{subject().key}.json").model == "tiny-hybrid-qa"
    run(MODEL, "--out", str(tmp_path / "mine.json"))
    assert read(tmp_path / "mine.json").subject == subject()


def test_the_users_own_tasks_are_a_set_of_their_own(lab: Lab, tmp_path: Path) -> None:
    line = {"input": "Who?", "context": "Ada came. " * 20_000, "answers": ["Ada"]}
    data = tmp_path / "mine.jsonl"
    data.write_text(2 * (json.dumps(line) + "\n"))
    judged(tmp_path / "out", "--data", str(data), "--prompts", "8")
    assert [(s.name, len(s.tasks)) for s in lab.sets] == [("fixed set", 8), ("mine.jsonl", 2)]
    assert lab.place.context > 30_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere/to/be/found/model"], "is neither a folder nor a model in this machine's"),
        (["no-such-organisation/no-such-model"], "is neither a folder nor a model in this machine's"),
        ([str(EXAMPLE)], "expected a model's folder, with a config.json"),
        ([MODEL, "--link", "fast"], "link='fast'"),
        ([MODEL, "--link", "full"], "reuses nothing"),
        ([MODEL, "--hypic", '{"seams": 4}'], "unknown option 'seams'"),
        ([MODEL, "--link", "block", "--try-seams", "0,4"], "'block' takes no seam window"),
        ([MODEL, "--choose", "--try-seams", "0,4"], "--choose excludes --try-seams, --context"),
        ([MODEL, "--choose", "--islands", "query-10"], "--choose excludes --try-seams, --context"),
        ([MODEL, "--choose", "--link", "epic-0"], "puts its own tokens before a segment"),
        ([MODEL, "--choose", "--out", "x.json"], "--out names one file"),
        ([MODEL, "--try-seams", "4,4"], "expected different numbers"),
        ([MODEL, "--try-seams", "0,4", "--out", "x.json"], "--out names one file"),
        ([MODEL, "--engine-args", "[]"], "expected a JSON object"),
        ([MODEL, "--engine-args", "{"], "is not JSON"),
        ([MODEL, "--engine-args", '{"attention_backend": 1}'], "the command sets 'attention_backend' itself"),
        ([MODEL, "--folder", MODEL], "is the model's own folder"),
        ([MODEL, "--out", f"{MODEL}/gate.json"], "is the model's own folder"),
        ([MODEL, "--folder", "/proc/nothing"], "sign-offs cannot be written there"),
        ([MODEL, "--data", __file__], "line 1: not JSON"),
        ([MODEL, "--prompts", "7"], "7 is not in the range"),
        ([MODEL, "--max-kl", "-1"], "-1.0 is not in the range"),
    ],
)
def test_usage_errors(lab: Lab, arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert " ".join(says.split()) in " ".join(result.output.replace("│", " ").split())
    assert lab.place is None


@pytest.mark.parametrize("failure", [EngineError("it died"), MeasureError("no"), PoolError("no room")])
def test_a_gate_that_does_not_finish_signs_nothing(lab: Lab, tmp_path: Path, failure: Exception) -> None:
    lab.found = failure
    assert f"the gate did not finish: {failure}" in judged(tmp_path, code=1)
    assert not list(tmp_path.iterdir())


def test_a_model_of_the_hub_is_found_in_its_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--an--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 4096}')
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert command.model_folder("an/model") == snapshot
    with pytest.raises(click.UsageError, match="neither a folder"):
        command.model_folder("another/model")


def test_the_fixed_set_is_fixed(generator: Generator) -> None:
    demo = partial(command.fixed_sets, generator, 9, chat=False)
    [one] = demo(0)
    kinds = list(generator.LEARNED)
    assert [t.family for t in one.tasks] == kinds * (10 // len(kinds))
    assert one.metric is Metric.EXACT and all(len(t.segments) == 8 for t in one.tasks)
    assert demo(0) == demo(0) != demo(1)
    # The fixed set of other models is questions and texts.
    questions, texts = command.fixed_sets(None, 9, 0, chat=True)
    assert [t.family for t in questions.tasks] == list(QUESTIONS) * 2
    assert questions.metric is Metric.CONTAINS and not any(t.continuation for t in questions.tasks)
    assert [t.family for t in texts.tasks] == list(CONTINUATIONS) * 2
    assert texts.metric is None and all(t.continuation for t in texts.tasks)


PATH = Path(__file__).parents[3] / "docs/how-to/choose-for-my-model.md"
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
    told = {row[2].strip("`"): float(row[3].strip("`")) for row in rows("Criteria", "criterion")}
    defaults = {p.opts[0]: p.default for p in gate.params if p.name in vars(Limits())}
    assert told == defaults and len(told) == len(vars(Limits()))
    told = {row[0].strip("`"): json.loads(row[1].strip("`")) for row in rows("At a server's start", "option")}
    assert told == dataclasses.asdict(GateConfig())
    for option in re.findall(r"`(--[a-z-]+)", TEXT):
        assert option in OPTIONS or option in ("--help", "--additional-config"), option
    for name in ("--prompts", "--kv-gib"):
        assert f"{OPTIONS[name].default:g}" in PROSE
    told = {int(row[0]): row[1] for row in rows("The command", "exit code")}
    assert sorted(told) == sorted(Exit)
    assert told[Exit.USAGE] == "usage" and told[Exit.CANNOT_JUDGE] == Verdict.CANNOT_JUDGE


def test_the_key_the_fixed_set_and_links() -> None:
    told = [name for row in rows("The sign-off", "part") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(f.name for f in dataclasses.fields(Subject))
    assert f"{OPTIONS['--prompts'].default} questions" in PROSE and len(QUESTIONS) == 5
    assert f"{DEMO_DOCUMENTS} documents of {DEMO_TOKENS} tokens" in PROSE
    assert f"{TEXT_TOKENS} tokens that follow" in PROSE and TEXTS_SHARE == 3
    assert all(f"(`{family}`)" in PROSE for family in CONTINUATIONS)
    assert f"at most {DATA_WORDS} words" in PROSE and f"({NOISE_CHUNK} tokens a step)" in PROSE

    # What is tried by --choose, and what a context is trained on.
    assert len(LADDER) == 7 and "cheapest go of seven" in PROSE
    assert all(f"`{islands}`" in PROSE for _, islands in LADDER if islands != "none")
    assert f"{LEAST_DOCUMENTS} texts of {NEEDED} tokens or more" in PROSE and HELD_OUT == 5 and PIECES == 4
    assert f"four pieces of {PIECE_TOKENS} tokens" in PROSE and f"next {QUERY_TOKENS} tokens" in PROSE

    def anchors(text: str) -> set[str]:
        lines = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}

    for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXT):
        text = (PATH.parent / file).read_text(encoding="utf-8") if file else TEXT
        assert not anchor or anchor in anchors(text), anchor
