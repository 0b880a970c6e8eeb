"""Options of ``vllm-hypic router``, and what its process loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import vllm_hypic.segment_parallel.router
from vllm_hypic.cli import main

ONE, TWO = ["--prefill", "http://127.0.0.1:1"], ["--combine", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--combine URL, or --pool URL"),
        (ONE, "--combine URL"),
        (TWO, "--prefill URL"),
        ([*ONE, "--combine", "127.0.0.1:8000"], "'127.0.0.1:8000': expected http://HOST:PORT"),
        ([*ONE, "--combine", "http://h:99999"], "'http://h:99999': expected http://HOST:PORT"),
        ([*ONE, "--combine", "http://h:1/?a=b"], "expected http://HOST:PORT"),
        ([*ONE, *ONE, *TWO], "is given twice"),
        ([*ONE, "--pool", "http://h:1"], "--pool cannot be combined with --prefill or --combine"),
        ([*ONE, *TWO, "--min-gain", "2"], "--min-gain 2.0: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--min-gain", "-0.5"], "--min-gain -0.5: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--min-gain", "nan"], "--min-gain nan: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--deadline-s", "0"], "--deadline-s 0.0: expected a finite number > 0"),
        ([*ONE, *TWO, "--deadline-s", "inf"], "--deadline-s inf"),
        ([*ONE, *TWO, "--segments-per-worker", "0"], "--segments-per-worker 0: expected 1 to 64"),
        ([*ONE, *TWO, "--straggler-factor", "0.5"], "--straggler-factor 0.5: expected a finite number >= 1"),
        ([*ONE, *TWO, "--silence-s", "1"], "--silence-s 1.0: expected a finite number >= 2"),
        ([*ONE, *TWO, "--port", "0"], "0 is not in the range"),
        ([*ONE, *TWO, "--secret-file", "/nowhere"], "secret_file='/nowhere': cannot be read"),
    ],
)
def test_bad_options_are_named(options: list[str], said: str) -> None:
    found = CliRunner().invoke(main, ["router", *options])
    assert found.exit_code == 2
    assert said in " ".join(found.output.split())


def test_a_short_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    found = CliRunner().invoke(main, ["router", *ONE, *TWO, "--secret-file", str(tmp_path / "secret")])
    assert found.exit_code == 2 and "expected 32" in found.output


def test_the_command_is_listed() -> None:
    assert "router" in CliRunner().invoke(main, ["--help"]).output


def loaded_after(code: str, modules: str) -> str:
    """Which of ``modules`` are loaded after ``code`` ran in a fresh interpreter."""
    code += f"\nimport sys; print(*(m for m in {modules.split()} if m in sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def test_neither_its_process_nor_transfers_load_vllm() -> None:
    package = Path(vllm_hypic.segment_parallel.router.__file__).parent
    names = [f"router.{p.stem}" for p in package.glob("*.py")]
    assert len(names) > 15
    names += ["receiver", "secret", "sender", "wire"]
    code = "import " + ", ".join(f"vllm_hypic.segment_parallel.{name}" for name in names)
    assert loaded_after(code, "vllm torch transformers numpy vllm_hypic.connector") == ""


def test_other_commands_do_not_load_the_router() -> None:
    code = (
        "from click.testing import CliRunner; from vllm_hypic.cli import main\n"
        "assert CliRunner().invoke(main, ['cache', '--help']).exit_code == 0"
    )
    assert loaded_after(code, "uvicorn zmq") == ""
