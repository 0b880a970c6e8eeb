"""Sign-offs as files: what is written is read, and nothing else counts."""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hypic.config.engine import HypicConfig, SegmentingConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.eval.gate import signoff, startup
from vllm_hypic.eval.gate.criteria import Limits, judge
from vllm_hypic.eval.gate.identity import NEUTRAL, Subject, telling
from vllm_hypic.eval.gate.signoff import FOLDER, SignOff, SignOffError, default_folder, path_in, read, write
from vllm_hypic.eval.gate.startup import cheapest, command, find, look

from .gate_numbers import answers, engine_config, model, numbers, subject


def signed(of: Subject, *, lost: int = 0, right: int = 92, **changed: Any) -> SignOff:
    judgement = judge(numbers(answers=(answers(right=right, lost=lost),)), Limits())
    limits = dataclasses.asdict(Limits())
    evidence = {"machine": {"cores": 2}}
    one = SignOff("a/model", of, judgement, limits, None, "2026-01-02T03:04:05+00:00", evidence)
    return replace(one, **changed)


OTHER = "is for other settings:"


def test_round_trip(tmp_path: Path) -> None:
    one = signed(subject(), lost=14, by="Ada")
    path = path_in(tmp_path / "new" / "folder", one.subject)
    write(path, one)
    assert read(path) == read(path, one.subject) == one
    write(path, again := signed(subject()))
    assert read(path) == again
    assert [p.name for p in path.parent.iterdir()] == [f"{one.subject.key}.json"]
    # Numbers that json has not are refused.
    with pytest.raises(ValueError, match="Out of range"):
        write(tmp_path / "x.json", signed(subject(), evidence={"kl": float("nan")}))
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize(
    ("change", "seal", "says"),  # of the content; with a checksum that fits
    [
        (lambda c: c.update(verdict="go"), False, "was changed since it was written"),
        (lambda c: c["evidence"].update(machine={}), False, "was changed since it was written"),
        (lambda c: c.pop("sha256"), False, "was changed since it was written"),
        (lambda c: c.update(format=0), True, "has format 0, expected 2: run the gate again"),
        (lambda c: c.update(format=3), True, "has format 3, expected 2"),
        (lambda c: c.pop("format"), True, "has format None, expected 2"),
        (lambda c: c.update(kind="bench"), True, "is no sign-off of the gate"),
        (lambda c: c.pop("verdict"), True, "is incomplete (KeyError: 'verdict')"),
        (lambda c: c.update(verdict="perhaps"), True, "is incomplete (ValueError"),
        (lambda c: c["subject"].pop("dtype"), True, "is incomplete (ValueError: expected the fields"),
        (lambda c: c.update(subject=3), True, "is incomplete (TypeError"),
        (lambda c: c.update(limits=None), True, "is incomplete (AttributeError"),
        (lambda c: c["subject"].update(dtype="float16"), True, f"{OTHER} dtype: 'float16', not 'bfloat16'"),
        (lambda c: c["subject"]["options"].update(seam_tokens=4), True, f"{OTHER} seam_tokens: 4, not 8"),
    ],
)
def test_what_does_not_count(tmp_path: Path, change: Callable[..., object], seal: bool, says: str) -> None:
    path = path_in(tmp_path, subject())
    write(path, signed(subject(), lost=14))
    content = json.loads(path.read_text())
    change(content)
    if seal:
        content.pop("sha256", None)
        content["sha256"] = signoff._checksum(content)
    path.write_text(json.dumps(content))
    with pytest.raises(SignOffError) as caught:
        read(path, subject())
    assert says in str(caught.value) and str(path) in str(caught.value)
    found = find(str(tmp_path), subject())
    assert found.sign_off is None and not found.go and says in found.says


def test_foreign_files_do_not_count(tmp_path: Path) -> None:
    path = path_in(tmp_path, subject())
    for text in ("", "{", "[]", "3", '{"a": 1}', "\udce9"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(SignOffError, match=r"is not JSON|is no sign-off"):
            read(path)
        assert not find(str(tmp_path), subject()).go, text
    path.unlink()
    path.mkdir()  # a folder in its place
    assert "cannot be read" in find(str(tmp_path), subject()).says


def test_every_option_is_told_or_named_neutral() -> None:
    options = {f.name for f in dataclasses.fields(HypicConfig)}
    assert options >= NEUTRAL
    unused = {"context", "context_file", "islands", "segment", "state_dtype"}
    assert set(telling(HypicConfig().for_model(model()))) == options - NEUTRAL - unused
    cut = SegmentingConfig(mode="cdc")
    used = HypicConfig(context="text", islands="query-10", segment=cut, state_dtype="float16")
    assert set(telling(used)) == options - NEUTRAL


def test_options_that_change_numbers_change_the_key_and_others_do_not() -> None:
    def key(**options: Any) -> str:
        return subject(HypicConfig.from_mapping(options)).key

    changed = {"link": "block", "seam_tokens": 4, "min_segment_tokens": 16, "dead_transition": 0}
    for name, value in (changed | {"state_dtype": "float16"}).items():
        assert key(**{name: value}) != subject().key, name
    for neutral in (
        {"page_tokens": 32, "pool_bytes": 1 << 30},
        {"gate": {"require": "go", "folder": "/x"}},
        {"store": {"tiers": [{"type": "memory", "bytes": 1}]}},
        {"dummy_token": 3},
    ):
        assert key(**neutral) == subject().key, neutral
    # Options that the link method does not read do not count.
    assert key(link="block", seam_tokens=4) == key(link="block", seam_tokens=8)
    assert key(link="naive", seam_tokens=4) != key(link="naive", seam_tokens=8)
    assert key(link="epic-0", dummy_token=3) != key(link="epic-0")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Subject) if f.name != "options"])
def test_every_field_is_in_the_key(field: str) -> None:
    other = subject(**{field: "another"})
    assert other.key != subject().key
    assert [line.split(":")[0] for line in other.differs(subject())] == [field]


def test_default_folder_and_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == Path("/cache/vllm-hypic/gates")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache/vllm-hypic/gates"
    # Whoever only warns must not end the start for it.

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(Path, "home", homeless)
    assert f"the user has no folder for sign-offs: set {FOLDER}" in find(None, subject()).says


Told = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Told:
    """Looks for a sign-off, for a model whose subject follows from the options; lines of the log."""

    def looked(folder: Path, require: str = "warn", processes: Any = (1, 0), **options: Any) -> list[str]:
        gate = {"require": require, "folder": str(folder)}
        config = HypicConfig.from_mapping({**options, "gate": gate}).for_model(model())
        parallel = SimpleNamespace(_api_process_count=processes[0], _api_process_rank=processes[1])
        caplog.clear()
        look(engine_config(parallel_config=parallel), config)
        return [f"{r.levelname} {r.getMessage()}" for r in caplog.records]

    monkeypatch.setattr(startup, "subject_of", lambda vllm_config, config: subject(config))
    # vLLM's logger, once configured, does not propagate to where caplog listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.hypic.gate")
    return looked


def test_a_go_is_told_and_lets_start(told: Told, tmp_path: Path) -> None:
    write(path_in(tmp_path, subject()), signed(subject(), by="Ada"))
    for require in ("warn", "go"):
        [line] = told(tmp_path, require)
        assert line.startswith("INFO hypic gate: go, signed off 2026-01-02T03:04:05+00:00 by Ada (")
    lenient = {**dataclasses.asdict(Limits()), "loss": 50.0}
    write(path_in(tmp_path, subject()), signed(subject(), limits=lenient))
    [line] = told(tmp_path, "go")
    assert "with non-default limits (loss 50)" in line


def test_a_server_takes_the_cheapest_that_is_a_go(told: Told, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seam_tokens": 4, "gate": {"choose": True, "folder": str(tmp_path)}}
    config = HypicConfig.from_mapping({**options, "islands": "query-50"})
    vllm_config = engine_config()
    with pytest.raises(ConfigError, match=r"no context and islands are signed off as a go; run: .* --choose"):
        cheapest(vllm_config, config)
    for islands, lost in {"none": 14, "query-10": 0, "query-20": 0}.items():
        of = subject(HypicConfig(seam_tokens=4, context="text", islands=islands))
        write(path_in(tmp_path, of), signed(of, lost=lost))
    assert cheapest(vllm_config, config) == replace(config, context="text", islands="query-10")
    full = replace(config, link="full")
    assert cheapest(vllm_config, full) is full, "there is nothing to choose"


@pytest.mark.parametrize(("verdict", "planted"), [("no-go", {"lost": 14}), ("cannot judge", {"right": 2})])
def test_any_other_verdict_is_told_with_its_reasons(
    told: Told, tmp_path: Path, verdict: str, planted: dict[str, int]
) -> None:
    one = signed(subject(), **planted)
    write(path_in(tmp_path, subject()), one)
    [line] = told(tmp_path)
    [reason] = one.judgement.against
    assert line.startswith(f"WARNING hypic gate: {verdict}, signed off") and reason.says in line
    says = rf"gate.require='go': {verdict}, signed off .* run: vllm-hypic gate"
    with pytest.raises(ConfigError, match=says):
        told(tmp_path, "go")


def test_without_a_go_nothing_starts_that_demands_one(told: Told, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gate.require='go': this model has no .* run: vllm-hypic gate "):
        told(tmp_path, "go")
    write(path_in(tmp_path, subject()), signed(subject()))
    with pytest.raises(ConfigError, match="no sign-off at these settings"):
        told(tmp_path, "go", seam_tokens=4)
    [line] = told(tmp_path, seam_tokens=4)
    says = "WARNING hypic gate: this model has no sign-off at these settings"
    way_out = "run: vllm-hypic gate /models/mine --dtype bfloat16 --hypic '{\"seam_tokens\": 4}' --folder"
    assert line.startswith(says) and line.endswith(f"{way_out} {tmp_path}")


def test_who_does_not_look(told: Told, tmp_path: Path) -> None:
    assert told(tmp_path, "off") == []
    assert told(tmp_path, "go", link="full") == []
    assert len(told(tmp_path, processes=(4, -1))) == 1
    assert told(tmp_path, processes=(4, 0)) == told(tmp_path, processes=(4, 3)) == []


def test_the_command_line_names_what_differs() -> None:
    options = {"link": "epic-0", "seam_tokens": 4, "dummy_token": 7, "page_tokens": 32}
    config = HypicConfig.from_mapping(options)
    one = subject(config, quantization="awq", kv_dtype="fp8", overrides='{"a": 1}', state_dtype="float32")
    engine = engine_config()
    engine.load_config.load_format = "safetensors"
    engine.model_config.revision, engine.model_config.trust_remote_code = "main", True
    assert command(engine, one, config.for_model(model())) == (
        "vllm-hypic gate /models/mine --dtype bfloat16 "
        '--hypic \'{"link": "epic-0", "dummy_token": 7}\' '
        '--engine-args \'{"quantization": "awq", "kv_cache_dtype": "fp8", "hf_overrides": {"a": 1}, '
        '"mamba_ssm_cache_dtype": "float32", "load_format": "safetensors", "revision": "main", '
        '"trust_remote_code": true}\''
    )


@pytest.mark.parametrize(
    ("dense", "options", "named"),
    [
        (True, {}, ""),
        (True, {"context": "none"}, '{"context": "none"}'),
        (True, {"islands": "query-20"}, '{"islands": "query-20"}'),
        (True, {"link": "block"}, '{"link": "block"}'),
        (False, {"islands": "none"}, ""),
        (False, {"context": "text"}, '{"context": "text"}'),
    ],
)
def test_the_command_line_names_what_is_no_default(dense: bool, options: dict[str, Any], named: str) -> None:
    config = HypicConfig(**options).for_model(model(dense=dense))
    line = command(engine_config(dense=dense), replace(subject(), options=telling(config)), config)
    assert line == f"vllm-hypic gate /models/mine --dtype bfloat16{named and f' --hypic {named!r}'}"
