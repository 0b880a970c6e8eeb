"""Programs that are forked from a process that has imported vLLM are processes like any other."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from lib import forked

BOUND_S = 60.0
pytestmark = pytest.mark.engine  # the process that forks imports vLLM


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + BOUND_S
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def test_a_program_has_arguments_environment_folder_and_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ.get('ONLY_HERE'), os.getcwd(), __name__)\n"
        "print('an error', file=sys.stderr)\nsys.exit(7)\n"
    )
    done = forked.run([sys.executable, script, "a b"], env={**os.environ, "ONLY_HERE": "1"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (7, "an error\n")
    assert done.stdout == f"['a b'] 1 {tmp_path} __main__\n"
    assert "ONLY_HERE" not in os.environ


def test_it_has_what_was_imported_before_and_a_session_of_its_own() -> None:
    done = forked.run(python("import os, sys; print('vllm' in sys.modules, os.getsid(0) == os.getpid())"))
    assert done.stdout == "True True\n", done.stderr


def test_an_exception_is_exit_code_1() -> None:
    done = forked.run(python("raise ValueError('no such thing')"))
    assert done.returncode == 1 and "ValueError: no such thing" in done.stderr


def test_other_threads_of_openmp_need_a_start_as_usual() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = forked.run(python("import sys; print('vllm' in sys.modules)"), env=env)
    assert done.stdout == "False\n", done.stderr


def test_what_takes_too_long_is_ended_with_its_group(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    code = f"import os, time; os.fork(); open({str(said)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(python(code), timeout=8)
    pids = [int(pid) for pid in said.read_text().split()]
    assert len(pids) == 2
    wait_until_gone(*pids)


def test_processes_that_end_at_once_are_all_known() -> None:
    processes = [forked.host("import os; os._exit(5)", Path(os.devnull), 0) for _ in range(20)]
    assert [process.wait(BOUND_S) for process in processes] == [5] * 20


def test_a_killed_process_says_so_and_is_no_zombie(tmp_path: Path) -> None:
    process = forked.launch(python("import time; time.sleep(600)"), tmp_path / "log")
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).wait(20)
    assert not psutil.pid_exists(process.pid)
    assert process.wait(BOUND_S) == process.returncode == -signal.SIGKILL


RUN = """
import sys, time
from pathlib import Path
from lib import forked
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
stubborn += "; time.sleep(600)"
log = Path(sys.argv[1])
process = forked.launch([sys.executable, "-c", stubborn], log)
while not log.read_text():
    time.sleep(0.05)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_test_run(tmp_path: Path) -> None:
    """Not even a program that takes no notice of SIGTERM."""
    imports = tmp_path / "engine" / "preloaded.py"  # in place of what takes 20 s
    imports.parent.mkdir()
    (imports.parent / "__init__.py").touch()
    imports.write_text("from benchmarks.lib import processes\nprocesses.GRACE_S = 1\n")
    with subprocess.Popen(
        [*python(RUN), str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        forks, imports_once, *_ = psutil.Process(pid).parents()
        assert not gone(pid)
        owner.kill()
    wait_until_gone(pid, forks.pid, imports_once.pid)
