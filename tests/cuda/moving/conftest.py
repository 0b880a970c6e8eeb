"""Which of these tests there are: without the package's requirements those that use a GPU where one is."""

from importlib.util import find_spec

import pytest

MISSING = [name for name in ("pydantic", "re2", "msgspec", "zmq") if find_spec(name) is None]

if MISSING:
    collect_ignore = ["test_cuda_copies.py", "test_cuda_moving.py", "test_two_instances.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MISSING:
        terminalreporter.write_line(
            f"tests/cuda/moving: without {', '.join(MISSING)} only what a GPU runs itself, the round trip"
        )
