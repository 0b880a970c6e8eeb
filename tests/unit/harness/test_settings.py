"""Options of the commands: what is refused before an engine starts."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from vllm_hypic.harness.engines import engine_environment
from vllm_hypic.harness.settings import CONTEXT, EngineSettings, model_context


def refused(*arguments: str) -> str:
    """The message; nothing may have been started for it."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "short"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 2048}}))
    return path


def test_every_command_has_help() -> None:
    for name in main.commands:
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ttft", "--segments", "0"], "0 is not in the range 1<=x<=256"),
        (["ttft", "--tokens", "10"], "10 is not in the range 64<=x<=65536"),
        (["ttft", "--size", "3b"], "'3b' is not one of"),
        (["ttft", "--model", "/nowhere"], "does not exist"),
        (["ttft", "--hypic", '{"seams": 3}'], "unknown option 'seams'"),
        (["ttft", "--hypic", "seam"], "Expecting value"),
        (["ttft-length", "--tokens", "1024,12"], "12 is not in the range 64<=x<=65536"),
        (["ttft-length", "--tokens", "1k"], "expected numbers separated by commas"),
        (["ttft-segments", "--segments", "4,4"], "expected different numbers"),
        (["records", "--bounds", "1e-8,0"], "0.0 is not in the range 0<x<1"),
        (["records", "--bounds", "nan"], "'nan': expected finite numbers"),
        (["overhead", "--grid", "4x"], "expected segments x tokens"),
        (["overhead", "--grid", "4x10"], "expected 1 to 256 segments of 64 to 65536"),
        (["memory", "--requests", "0"], "0 is not in the range"),
        (["profile", "--kv-gib", "0"], "0.0 is not in the range"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("command", "arguments", "messages"),
    [
        ("ttft-segments", ["--segments", "4"], ["at least two numbers"]),
        ("seam", ["--tokens", "64", "--windows", "32"], ["too short for a window of 32"]),
        ("ttft", ["--json", "/nowhere/a.json"], ["there is no folder /nowhere"]),
        (
            "ttft",
            ["--segments", "4", "--tokens", "1024"],
            ["short has a context of 2048 tokens, but this command needs 4224", "fewer or shorter segments"],
        ),
    ],
)
def test_what_does_not_fit(model: Path, command: str, arguments: list[str], messages: list[str]) -> None:
    """Options and each other, or the model."""
    told = refused(command, "--model", str(model), *arguments)
    assert all(message in told for message in messages), told


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert "expected a model's folder, with a config.json" in refused("ttft", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refused("ttft", "--model", str(tmp_path))


def test_arguments_of_engines(model: Path) -> None:
    """vLLM's defaults, and options that are given."""
    settings = EngineSettings(model, threads=1)
    arguments = settings.arguments(1000, hypic=False)
    assert arguments == {"model": str(model), "max_model_len": 2048, "kv_cache_memory_bytes": 2 * 2**30}
    assert settings.arguments(1000, hypic=True) == arguments | {"attention_backend": "hypic"}
    given = {"max_num_batched_tokens": 512, "dtype": "float32", "kv_cache_dtype": "fp8"}
    settings = EngineSettings(model, 1, True, **given, hypic={"seam_tokens": 4})
    arguments = settings.arguments(1000, hypic=True, enable_prefix_caching=False)
    expected = given | {"enforce_eager": True, "enable_prefix_caching": False}
    expected |= {"additional_config": {"hypic": {"seam_tokens": 4}}}
    assert {name: arguments[name] for name in expected} == expected


def test_context_is_the_same_for_short_benchmarks_of_long_models(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4 * CONTEXT}))
    assert model_context(model) == 4 * CONTEXT
    settings = EngineSettings(model, threads=1)
    assert settings.arguments(1000, hypic=False)["max_model_len"] == CONTEXT
    assert settings.arguments(2 * CONTEXT, hypic=False)["max_model_len"] == 2 * CONTEXT
    with pytest.raises(click.UsageError):
        settings.arguments(8 * CONTEXT, hypic=False)


def test_a_stock_engine_does_not_load_the_plugin() -> None:
    assert engine_environment(1, hypic=False)["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in engine_environment(1, hypic=True)
