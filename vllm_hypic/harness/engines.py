"""Engines for evaluation and benchmarks, each in a process of its own.

The plugin replaces layers of a whole process, so a stock engine's process never loads the plugin. The engine
core runs in the same process as ``LLM``, with the OpenMP environment that vLLM gives its worker processes. An
idle engine thus sleeps on a pipe, and takes no time from the engine under measurement.

Functions do the work in the engine's process: ``engine.call(function, *args)`` runs
``function(llm, *args)`` there. Functions must be importable, arguments and results picklable.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ..primitives.options import LinkDefaults, link_of_request
from ..primitives.policies import LinkMethod
from . import engine_calls
from .engine_calls import Answer, Ask
from .settings import EngineSettings

LOG_TAIL = 15
POLL_S = 1.0

T = TypeVar("T")


class EngineError(RuntimeError):
    """An engine did not start, died, or took too long; the message holds the end of its log."""


class Engine:
    """An engine. Making an engine starts a process and returns at once; :meth:`start` must come first."""

    def __init__(
        self,
        settings: EngineSettings,
        context: int,
        *,
        hypic: bool,
        name: str | None = None,
        **more: Any,
    ) -> None:
        """``context``: tokens of the longest prompt and its answer; ``more``: further options of ``LLM``."""
        self.name = name or ("hypic" if hypic else "stock")
        self.hypic, self.timeout_s = hypic, settings.timeout_s
        arguments = settings.arguments(context, hypic=hypic, **more)
        descriptor, log = tempfile.mkstemp(prefix=f"vllm-hypic-{self.name}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(log)
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, str(self.log), arguments), daemon=True)
        with _environment(engine_environment(settings.threads, hypic=hypic)):
            self._process.start()
        theirs.close()
        self.separator = -1
        """Token id of the separator; -1 in a stock engine."""
        self.vocabulary: list[int] = []
        """Ids of ordinary tokens."""
        self.link_defaults: LinkDefaults | None = None
        """Link options that requests have by default; ``None`` in a stock engine."""
        self.described: dict[str, Any] = {}
        """Settings of the engine, including vLLM's own choices."""

    def start(self) -> None:
        """Wait until the engine is up."""
        self._answer("start")
        facts = self.call(engine_calls.facts)
        self.separator, self.vocabulary = facts.separator, facts.vocabulary
        self.link_defaults, self.described = facts.link_defaults, facts.described

    def link(self, extra: Mapping[str, Any] | None = None) -> LinkMethod:
        """Return the link method of a hypic engine's requests with the options ``extra``."""
        assert self.link_defaults is not None
        return link_of_request(extra, self.link_defaults)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run ``function(llm, *args)`` in the engine's process and return its result."""
        try:
            self._pipe.send((function, args))
        except OSError:
            raise EngineError(self._told("died")) from None
        return self._answer(getattr(function, "__name__", str(function)))

    def ask(self, ask: Ask) -> Answer:
        """Run a single request alone, and return its answer."""
        [answer] = self.call(engine_calls.generate, [ask])
        return answer

    def _answer(self, what: str) -> Any:
        deadline = time.monotonic() + self.timeout_s
        try:
            while not self._pipe.poll(POLL_S):
                if not self._process.is_alive() and not self._pipe.poll():
                    raise EngineError(self._told(f"died ({self._exit()})"))
                if time.monotonic() > deadline:
                    self.kill()
                    raise EngineError(self._told(f"took more than {self.timeout_s:g} s for {what}"))
            error, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(POLL_S)
            raise EngineError(self._told(f"died ({self._exit()})")) from None
        if error is not None:
            raise EngineError(self._told(f"failed in {what}:\n{error}"))
        return result

    def _exit(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}" + (", out of memory?" if code == -9 else "")
        return f"exit code {code}"

    def _told(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"the {self.name} engine {what}; its log {self.log} ends:\n" + "\n".join(lines[-LOG_TAIL:])

    def stop(self) -> None:
        """End the process of an idle engine and delete its log; further calls change nothing."""
        self._pipe.close()
        # An idle process ends by itself when its pipe closes.
        self._process.join(20)
        self.kill()
        self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the process whatever it does, and keep its log."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Start engines, and end all their processes after the ``with`` block. A failure keeps the logs."""
    try:
        for engine in engines:
            engine.start()
        yield
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    for engine in engines:
        engine.stop()


def engine_environment(threads: int, *, hypic: bool) -> dict[str, str]:
    """Return the environment of an engine's process.

    vLLM runs its CPU workers in processes that preload torch's own libgomp and, by default, bind one thread
    to each core. This environment does the same if ``threads`` is the number of usable cores. Fewer threads
    stay unbound, because other processes may need the cores.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The user may choose another level.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if not hypic:
        environment["VLLM_PLUGINS"] = ""
    cores = sorted(os.sched_getaffinity(0))
    if threads == len(cores) and (library := _libgomp()) is not None:
        preload = os.environ.get("LD_PRELOAD", "")
        if "gomp" not in preload and "iomp" not in preload:
            environment["LD_PRELOAD"] = f"{preload}:{library}" if preload else str(library)
            environment["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    return environment


def _libgomp() -> Path | None:
    """Return the path of torch's own libgomp, or ``None`` if there is none."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        root = Path(folder)
        found = [*root.parent.glob("torch.libs/libgomp*.so*"), *root.glob("lib/libgomp*.so*")]
        if found:
            return found[0]
    return None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a process must find at its start, as libraries read variables before Python runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(pipe: Connection, log: str, arguments: dict[str, Any]) -> None:
    """Run an engine process: receive functions and send their results until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    llm: Any = None
    function: Callable[..., Any] = engine_calls.start
    args: tuple[Any, ...] = (arguments,)
    while True:
        try:
            result = function(llm, *args)
            if llm is None:
                llm, result = result, None
            pipe.send((None, result))
        except (BrokenPipeError, ConnectionError):
            return
        except Exception as e:
            traceback.print_exc()
            pipe.send((f"{type(e).__name__}: {e}", None))
            if llm is None:
                return
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
