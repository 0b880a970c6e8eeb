"""``vllm bench serve`` over the requests of a trace: a process for each measurement, and its JSON read.

Its clock and its client are vLLM's: an open loop, requests go out when they arrive, however slow the answers
are.  Only the requests are ours.  None of the datasets of vLLM 0.32 can hold them:

* ``custom`` reads texts and lengths of answers, but no arrivals; token ids only where every answer has one
  length (``--skip-tokenizer-init``).
* ``timed_trace`` reads arrivals and lengths of answers, but draws the prompts' tokens itself.

So ``python -m benchmarks.bench_serve`` is ``vllm bench serve --dataset-name timed_trace`` with another reader
of ``--dataset-path``, :func:`samples`.  A line of the file holds ``prompt`` (token ids or a text),
``output_tokens`` and ``timestamp`` (seconds); files of texts can also be given to vLLM's ``custom``.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .lib.processes import launch

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.25
START_S = 300.0
"""Longest time that the process may take beside the requests' own: importing vLLM, on a busy machine."""


class BenchError(RuntimeError):
    """``vllm bench serve`` gave no result; the message holds the end of what it said."""


class End(Enum):
    """How a request ended."""

    DONE = "done"
    TIMEOUT = "timeout"
    """No complete answer within the request's time."""
    FAILED = "failed"
    """Refused, broken off or unreadable."""
    STOPPED = "stopped"
    """Given up, because the measurement was decided."""


@dataclass(frozen=True)
class TimedRequest:
    """A prompt that arrives ``at`` seconds after the start and is answered with ``output_tokens`` tokens."""

    at: float
    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True)
class Outcome:
    """One request's life; times in seconds from the start of the run."""

    scheduled: float
    end: End
    error: str = ""
    sent: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    """Time from the scheduled arrival to the first output; ``None`` where there was none."""
    gaps: tuple[float, ...] = ()
    """Between events with output: inter-token latencies where a server sends token by token."""
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first, mean; ``None`` with fewer than two."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.gaps and self.output_tokens > 1 else None

    @property
    def late(self) -> float:
        """Seconds between the schedule and the sending: the client's own delay."""
        return self.sent - self.scheduled


@dataclass(frozen=True)
class Bench:
    """``vllm bench serve`` for one server: its address (without ``/v1``) and the name of its model."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    """Longest time of one request."""

    def run(
        self,
        requests: Sequence[TimedRequest],
        *,
        at_once: int | None = None,
        decided: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Send the requests when they are due, and wait for all answers; outcomes are in their order.

        ``at_once``: send so many at a time instead, each as soon as one before it is answered.  ``decided``
        is asked a few times a second; once it says so, all requests end as ``STOPPED``.  Raises
        :class:`BenchError` where the process fails.
        """
        due = requests[-1].at - requests[0].at if at_once is None else 0.0
        patience = self.timeout_s if at_once is None else self.timeout_s * -(-len(requests) // at_once)
        deadline = time.monotonic() + START_S + due + patience
        with tempfile.TemporaryDirectory(prefix="hypic-bench-serve-") as name:
            folder = Path(name)
            lines = (
                {"prompt": r.prompt, "output_tokens": r.output_tokens, "timestamp": r.at} for r in requests
            )
            (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            log = folder / "log"
            process = launch(self._command(folder, len(requests), at_once), log, env=self._environment())
            try:
                while process.poll() is None:
                    if decided():
                        return [Outcome(r.at, End.STOPPED) for r in requests]
                    if time.monotonic() > deadline:
                        error = f"no complete answers after {self.timeout_s:g} s"
                        return [Outcome(r.at, End.TIMEOUT, error) for r in requests]
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            result = folder / "result.json"
            if process.returncode or not result.exists():
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise BenchError(f"vllm bench serve ended with exit code {process.returncode}:\n{tail}")
            return self._outcomes(requests, json.loads(result.read_text()), timed=at_once is None)

    def _command(self, folder: Path, requests: int, at_once: int | None) -> list[str]:
        timing = ["--self-timed"]
        if at_once is not None:
            timing = ["--no-self-timed", "--max-concurrency", str(at_once)]
        return [
            *(sys.executable, "-m", "benchmarks.bench_serve", "--backend", "vllm", "--base-url", self.url),
            *("--model", self.model, "--skip-tokenizer-init", "--dataset-name", "timed_trace"),
            *("--dataset-path", str(folder / "requests.jsonl"), "--num-prompts", str(requests), *timing),
            *("--temperature", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"),
            *("--save-result", "--save-detailed"),
            *("--result-dir", str(folder), "--result-filename", "result.json"),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        key = {"OPENAI_API_KEY": self.api_key} if self.api_key else {}
        return {**environment, **key, "PYTHONPATH": path, "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}

    def _outcomes(
        self, requests: Sequence[TimedRequest], told: dict[str, Any], *, timed: bool
    ) -> list[Outcome]:
        """The result file's lists, one entry for each request in the order of the file."""
        starts, first = told["start_times"], told["start_times"][0]
        outcomes = []
        for i, request in enumerate(requests):
            # The run starts when its first request is sent: what the client is late with counts from there.
            sent = starts[i] - first + (requests[0].at if timed else 0.0)
            scheduled = min(request.at, sent) if timed else sent
            output, latency = int(told["output_lens"][i]), float(told["latencies"][i])
            end, error = End.DONE, ""
            if text := told["errors"][i].strip():
                end, error = End.FAILED, text.splitlines()[-1]
            elif output != request.output_tokens:
                end, error = End.FAILED, f"the answer has {output} of {request.output_tokens} tokens"
            elif latency > self.timeout_s:
                end, error = End.TIMEOUT, f"no complete answer after {self.timeout_s:g} s"
            got = end is not End.FAILED
            outcomes.append(
                Outcome(
                    scheduled,
                    end,
                    error,
                    sent=sent,
                    ended=sent + latency,
                    ttft=sent - scheduled + told["ttfts"][i] if got else None,
                    gaps=tuple(told["itls"][i]),
                    prompt_tokens=int(told["input_lens"][i]) if got else 0,
                    output_tokens=output,
                )
            )
        return outcomes


# -- in the process ----------------------------------------------------------------------------------


def samples(args: Any, tokenizer: Any) -> list[Any]:
    """The requests in the file ``args.dataset_path``, as ``vllm bench serve`` takes them."""
    from vllm.benchmarks.datasets import SampleRequest

    with open(args.dataset_path) as lines:
        read = [json.loads(line) for line in lines]
    return [
        SampleRequest(
            prompt=r["prompt"],
            prompt_len=len(r["prompt"]),  # until the server has counted them
            expected_output_len=r["output_tokens"],
            timestamp=r["timestamp"],
        )
        for r in read
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``vllm bench serve`` with :func:`samples` in place of vLLM's datasets."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if list(inspect.signature(serve.get_samples).parameters)[:2] != ["args", "tokenizer"]:
        sys.exit("vllm.benchmarks.serve.get_samples differs from vLLM 0.32, which this benchmark supports")
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    args = parser.parse_args(arguments)
    serve.get_samples = samples
    serve.main(args)


if __name__ == "__main__":
    main()
