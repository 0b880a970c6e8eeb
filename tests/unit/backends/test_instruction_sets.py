"""``HYPIC_ISA``: the kernels of other instruction sets agree too, and what cannot be had is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hypic.backends.ops import extension
from vllm_hypic.errors import ConfigError

TESTS = Path(__file__).parents[1]
AGAIN = {
    TESTS / "backends" / "test_span_attention.py": 100,
    TESTS / "backends" / "test_fp8_and_caps.py": 100,
    TESTS / "linear" / "test_every_operator.py": 200,
    TESTS / "linear" / "test_layer_operators.py": 3,
    TESTS / "linear" / "test_decay_attention.py": 0,
}
"""Each has more tests than that with an id ``c++``."""


def run(isa: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """``python -m``, with this ``HYPIC_ISA``: the choice is made once per process.

    One thread: what threads do is the same in all instruction sets, and waiting for each other takes them
    longer than these small tensors.
    """
    environment = {**os.environ, "HYPIC_ISA": isa, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.fast("avx2")
@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16"])
def test_older_machines(isa: str) -> None:
    """The tests of the C++ kernels in a process that uses those of an older machine."""
    probe = run(isa, "vllm_hypic.backends.ops.extension")
    if probe.returncode and "does not run it" in probe.stderr:
        pytest.skip(probe.stderr.strip())
    assert probe.stdout == f"C++ kernels ({isa})\n", probe.stderr
    done = run(isa, "pytest", "-x", "-p", "no:cacheprovider", "-k", "c++", "-v", *AGAIN)
    assert done.returncode == 0, done.stdout[-3000:]
    for file, least in AGAIN.items():
        passed = re.findall(rf"{file.name}::.* PASSED", done.stdout)
        assert len(passed) > least, (file.name, done.stdout[-3000:])


def test_unknown_names_are_refused() -> None:
    """A typo must not end in the PyTorch versions, unnoticed."""
    probe = run("avx-2", "vllm_hypic.backends.ops.extension")
    assert probe.returncode == 1 and not probe.stdout
    assert probe.stderr == "hypic: HYPIC_ISA=avx-2: expected one of amx, avx512_bf16, avx512, avx2\n"


def test_without_kernels_none_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_hypic._C", None)
    # Not what this process has found.
    monkeypatch.setattr(extension, "kernels", extension.kernels.__wrapped__)
    missing = extension.missing.__wrapped__
    monkeypatch.setenv("HYPIC_ISA", "avx2")
    with pytest.raises(ConfigError, match=r"^hypic: HYPIC_ISA=avx2: the C\+\+ kernels are not built"):
        missing()
    monkeypatch.setenv("HYPIC_ISA", "")
    assert missing().startswith("not built (import of vllm_hypic._C halted")
