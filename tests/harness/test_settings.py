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
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, name


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
        (["ttft-length", "--tokens", "1k"], "expected numbers with commas between"),
        (["ttft-segments", "--segments", "4,4"], "a number stands there twice"),
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


def test_options_that_do_not_fit_together(model: Path) -> None:
    of = ("--model", str(model))
    assert "at least two numbers" in refused("ttft-segments", *of, "--segments", "4")
    assert "too short for a window of 32" in refused("seam", *of, "--tokens", "64", "--windows", "32")
    assert "there is no folder /nowhere" in refused("ttft", *of, "--json", "/nowhere/a.json")


def test_a_context_that_is_too_short_is_named(model: Path) -> None:
    message = refused("ttft", "--model", str(model), "--segments", "4", "--tokens", "1024")
    assert "short has a context of 2048 tokens, this benchmark needs 4224" in message
    assert "fewer or shorter segments" in message


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    assert "no config.json there" in refused("ttft", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in refused("ttft", "--model", str(tmp_path))


def test_engines_get_vllms_defaults(model: Path) -> None:
    settings = EngineSettings(model, threads=1)
    arguments = settings.arguments(1000, hypic=False)
    assert arguments == {
        "model": str(model),
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 2 * 2**30,
    }
    assert settings.arguments(1000, hypic=True) == arguments | {"attention_backend": "hypic"}


def test_given_options_reach_the_engine(model: Path) -> None:
    hypic = {"seam_tokens": 4}
    settings = EngineSettings(model, 1, True, max_num_batched_tokens=512, kv_cache_dtype="fp8", hypic=hypic)
    arguments = settings.arguments(1000, hypic=True, enable_prefix_caching=False)
    assert arguments["enforce_eager"] is True
    assert arguments["max_num_batched_tokens"] == 512
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["additional_config"] == {"hypic": {"seam_tokens": 4}}
    assert arguments["enable_prefix_caching"] is False


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
