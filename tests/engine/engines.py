"""Real vLLM engines for tests, each in a process of its own.

Replacements of vLLM's layers are registered per process, so an engine that is to be *stock* must never
share one with the plugin's. Processes are forked from one that has imported vLLM (``lib/forked.py``): a start
takes a second, not the imports' 15.

Work is done by functions that run beside the engine: ``engine.call(function, *args)`` runs
``function(llm, *args)`` there. Functions must be importable (no lambdas), arguments and results picklable.
The engine core runs in the same process, so such a function sees the scheduler and the worker.
"""

import multiprocessing
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from lib import forked

SEP, PDEP, PAD = 496, 497, 498
"""Ids of the primitives on models of ``oracle.models``: the tokenizer's first spare ids."""

FIRST_WORD, LAST_WORD = 4, 495
"""Ordinary token ids of these models."""

CACHE_BYTES = 64 << 20
"""vLLM's own cache of one engine.  All of it is written to at the start."""
CALL_TIMEOUT = 540.0
LOG_TAIL = 25

T = TypeVar("T")


class EngineError(Exception):
    """A function failed beside an engine; ``kind`` is the exception's class name there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Ask:
    """One request, with separators in ``tokens`` where wanted."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    extra: dict[str, Any] = field(default_factory=dict)
    """``hypic_link``, ``hypic_seam_tokens``."""
    salt: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's ``SamplingParams``."""
    media: dict[str, list[Any]] = field(default_factory=dict)
    """Images and the like, by modality."""

    def plain(self) -> Self:
        """The same logical prompt as an ordinary request."""
        tokens = tuple(t for t in self.tokens if t not in (SEP, PDEP, PAD))
        return Ask(tokens, self.max_tokens, {}, self.salt, self.sampling, self.media)


@dataclass(frozen=True)
class Answer:
    """What came back: tokens of every sample, their logprobs (id -> logprob, per token), tokens read
    from a cache, and why it ended."""

    samples: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[dict[int, float], ...], ...]
    cached: int
    reasons: tuple[str | None, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.samples[0]

    @property
    def first(self) -> dict[int, float]:
        """Logprobs of the first generated token."""
        return self.logprobs[0][0]


def same(one: Answer, *others: Answer) -> bool:
    """Whether tokens and logprobs are equal, bit for bit."""
    return all(one.samples == other.samples and one.logprobs == other.logprobs for other in others)


def all_same(*runs: Sequence[Answer]) -> bool:
    """Whether runs of the same requests have the same answers, bit for bit."""
    return all(same(*answers) for answers in zip(*runs, strict=True))


def distance(one: Answer, other: Answer) -> float:
    """Largest difference of the first token's logprobs, over the tokens that both report."""
    return max(abs(one.first[t] - other.first[t]) for t in one.first.keys() & other.first.keys())


def largest_distance(run: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest :func:`distance` between the answers of two runs of the same requests."""
    return max(distance(*answers) for answers in zip(run, other, strict=True))


def prompt(*segments: Sequence[int], query: Sequence[int], lead: Sequence[int] = ()) -> tuple[int, ...]:
    """Token ids ``lead SEP segment SEP ... SEP query``."""
    tokens = list(lead)
    for segment in segments:
        tokens += [SEP, *segment]
    return (*tokens, SEP, *query)


class Engine:
    """One vLLM engine in a process of its own.

    ``hypic=False``: stock vLLM (the plugin is installed, as it is for every user, but not chosen).
    ``options`` are the plugin's own, ``engine_args`` vLLM's, ``env`` goes into the process, where ``mended``
    runs first: a patch without which a stock engine does not run.
    ``overlap=True`` switches asynchronous scheduling on, which vLLM turns off for CPUs.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        hypic: bool = True,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        overlap: bool = False,
        mended: Callable[[], None] | None = None,
        **engine_args: Any,
    ) -> None:
        args: dict[str, Any] = {
            "model": str(model),
            "dtype": "bfloat16",
            # The same on every CPU.
            "mamba_ssm_cache_dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": True,
            "seed": 0,
            "kv_cache_memory_bytes": CACHE_BYTES,
        }
        if hypic:
            # A start with default sizes: about thirty records of the tiny models.
            chosen: dict[str, Any] = {
                "page_tokens": 32,
                "expected_segment_tokens": 128,
                "pool_bytes": 16 << 20,
                # The same on every model: what is not named is not there.
                "context": "none",
                "islands": "none",
            }
            args["attention_backend"] = "hypic"
            args["additional_config"] = {"hypic": chosen | (options or {})}
        args |= engine_args
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            # These models gain nothing from more threads, and bound ones wait for what else uses their cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self._host = _Host(log)
        try:
            self._host.run(_start, (environment, args, overlap, mended), CALL_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., T], *args: Any, timeout: float = CALL_TIMEOUT) -> T:
        """Run ``function(llm, *args)`` beside the engine.

        Raises :class:`EngineError` when it raises, dies or takes longer than ``timeout`` seconds; in the
        last two cases the engine is gone.
        """
        return self._host.run(_beside, (function, args), timeout)

    def ask(self, *asks: Ask) -> list[Answer]:
        """All requests at once."""
        return self.call(generate, list(asks))

    def ask_one_by_one(self, *asks: Ask) -> list[Answer]:
        return [self.ask(ask)[0] for ask in asks]

    def ask_and_close(self, *asks: Ask) -> list[Answer]:
        with self:
            return self.ask_one_by_one(*asks)

    def metrics(self) -> dict[str, float]:
        return self.call(metrics)

    def check_clean(self) -> None:
        """Nothing is under way or held, and the pool's books are right: :func:`audit`."""
        left = self.call(audit)
        assert left.clean, f"something is left behind: {left}"

    def reset(self) -> None:
        """Empty vLLM's prefix cache and the public pool."""
        assert self.call(reset_caches), "a cache did not become empty"

    def close(self) -> None:
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_apart(function: Callable[..., T], *args: Any, log: Path, timeout: float = CALL_TIMEOUT) -> T:
    """Run ``function(*args)`` in a fresh process that has vLLM's modules loaded."""
    with closing(_Host(log)) as host:
        return host.run(function, args, timeout)


# -- functions that run beside the engine ------------------------------------------------------------


def entry_of(ask: Ask) -> dict[str, Any]:
    """The prompt as vLLM takes it."""
    entry: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
    if ask.salt is not None:
        entry["cache_salt"] = ask.salt
    if ask.media:
        entry["multi_modal_data"] = ask.media
    return entry


def outputs_of(llm: Any, *asks: Ask, **more: Any) -> list[Any]:
    """vLLM's own outputs of requests that run together."""
    entries, params = [entry_of(ask) for ask in asks], [sampling_params(ask) for ask in asks]
    return llm.generate(entries, params, use_tqdm=False, **more)


def generate(llm: Any, asks: Sequence[Ask], **more: Any) -> list[Answer]:
    return [answer_of(output) for output in outputs_of(llm, *asks, **more)]


def begin(llm: Any, name: str, ask: Ask, **more: Any) -> str:
    """Add a request, which runs as somebody steps; returns its name in the engine."""
    return str(llm.llm_engine.add_request(name, entry_of(ask), sampling_params(ask), **more))


def run_to_end(llm: Any, name: str) -> Any:
    """Step until the request has ended; returns vLLM's output."""
    while True:
        for output in llm.llm_engine.step():
            if output.finished and output.request_id == name:
                return output


def reset_caches(llm: Any) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=True))


def sampling_params(ask: Ask) -> Any:
    from vllm import SamplingParams

    fields = {"temperature": 0.0, "logprobs": 20, "ignore_eos": True, "detokenize": False} | ask.sampling
    return SamplingParams(max_tokens=ask.max_tokens, extra_args=dict(ask.extra) or None, **fields)


def answer_of(output: Any) -> Answer:
    logprobs = tuple(
        tuple({i: entry.logprob for i, entry in step.items()} for step in (sample.logprobs or []))
        for sample in output.outputs
    )
    return Answer(
        tuple(tuple(sample.token_ids) for sample in output.outputs),
        logprobs,
        output.num_cached_tokens or 0,
        tuple(sample.finish_reason for sample in output.outputs),
    )


def metrics(llm: Any) -> dict[str, float]:
    """Counters and gauges by name; needs ``disable_log_stats=False``."""
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def scheduler_of(llm: Any) -> Any:
    """The engine core's scheduler; on a hypic engine its ``.hypic`` is the ``SchedulerConnector``."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker_of(llm: Any) -> Any:
    """The plugin's ``WorkerConnector`` of a hypic engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def store_of(llm: Any) -> Any:
    """The ``TieredStore`` of a hypic engine."""
    from vllm_hypic.connector.worker.store_link import StoreLink

    return next(link.store for link in worker_of(llm).links if isinstance(link, StoreLink))


def plan_of(
    llm: Any, tokens: Sequence[int], extra: dict[str, Any] | None = None, salt: str | None = None
) -> Any:
    """The plan that a hypic engine makes of a prompt."""
    from vllm_hypic.connector.scheduler.planning import PlanRequest

    side = scheduler_of(llm).hypic
    return side.plan(PlanRequest(list(tokens), side.spec(extra, len(tokens)), salt, None))


def pool_unit_bytes(llm: Any) -> tuple[int, int]:
    """Bytes of one page, and of one state slot with blocks for all transitions, of a hypic engine's pool."""
    geometry = scheduler_of(llm).hypic.geometry
    transitions = geometry.record_transition_blocks * geometry.transition_block_bytes
    return geometry.page_bytes, geometry.slot_bytes + transitions


def drain(llm: Any, steps: int = 2000) -> None:
    """Step until the engine core has no request left; ``LLM`` itself looks at clients' requests only."""
    scheduler = scheduler_of(llm)
    for _ in range(steps):
        if not scheduler.get_num_unfinished_requests():
            return
        llm.llm_engine.step()
    raise RuntimeError(f"requests left after {steps} steps: {list(scheduler.requests)}")


@dataclass(frozen=True)
class Audit:
    """What an idle engine still holds, by kind; cached blocks and unpinned records do not count."""

    free_blocks: int
    held: dict[str, int]

    @property
    def clean(self) -> bool:
        return not any(self.held.values())


def audit(llm: Any) -> Audit:
    """Check the pool's books and count what is still held.

    The worker hears that requests are over with the next step's metadata, so a plain request runs
    first, after whatever was under way. Raises ``RuntimeError`` when the directory's books are wrong.
    """
    drain(llm)
    generate(llm, [Ask((FIRST_WORD, LAST_WORD), max_tokens=1)])
    scheduler, worker = scheduler_of(llm), worker_of(llm)
    side = scheduler.hypic
    requests = side.segment_requests
    side.directory.check_integrity()
    held = {
        "unfinished": scheduler.get_num_unfinished_requests(),
        "pinned": side.directory.pinned,
        "composed": len(side.admission.requests) + len(side.admission._pending),
        "captures": len(requests._segments) + len(requests._incomplete),
        "moved": len(side.loads) + len(side._pushes),
        "held": len(side._held) + len(scheduler._ending),
        "commands": len(scheduler._commands._answers),
        "prompt logprobs": len(scheduler._prompt_logprobs._rows),
        "worker's streams": len(worker._streams),
        "worker's captures": len(worker._captures),
        "carried": sum(len(layer.carries) for layer in worker.runtime.carrying),
    }
    return Audit(scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), held)


# -- the process -------------------------------------------------------------------------------------

_engine: Any = None


def _start(
    environment: dict[str, str], args: dict[str, Any], overlap: bool, mended: Callable[[], None] | None
) -> None:
    global _engine
    os.environ.update(environment)
    import torch
    import torch._dynamo
    from vllm import LLM

    # The sampler's count of better tokens is compiled for every new shape: seconds each.  The variable was
    # read when the fork server imported torch.
    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
    if mended is not None:
        mended()

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if overlap:
        _keep_async_scheduling()
    _engine = LLM(**args)


def _keep_async_scheduling() -> None:
    """Undo the CPU platform's ``async_scheduling = False`` in this process.

    There it gains nothing, but nothing stands in its way either: the engine core's batch queue and
    vLLM's model runner work as they do on a GPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _beside(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    return function(_engine, *args)


class _Host:
    """A process that runs one function after another."""

    def __init__(self, log: Path) -> None:
        self.log = log
        # Tensors go by way of a server that asks for it.
        key = bytes(multiprocessing.current_process().authkey)
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from engine.engines import serve; serve({key!r})"
            self._process = forked.host(code, log, theirs.fileno())
        self._pipe = Connection(ours.detach())

    def run(self, function: Callable[..., T], args: tuple[Any, ...], timeout: float) -> T:
        deadline = time.monotonic() + timeout
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise EngineError("TimeoutError", f"no result after {timeout:.0f} s{self._tail()}")
            error, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.close()
            raise EngineError("Died", f"the process died{self._tail()}") from None
        if error is not None:
            kind, text = error
            raise EngineError(kind, f"{text}{self._tail()}")
        return result

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"\n--- end of {self.log}:\n" + "\n".join(lines[-LOG_TAIL:])

    def close(self) -> None:
        """End the process.  May be called any number of times."""
        self._pipe.close()
        # A process that is idle ends by itself when its pipe closes.
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.end()


def serve(key: bytes) -> None:
    """Main loop of the process: functions in, results out, until the pipe closes."""
    multiprocessing.current_process().authkey = key
    pipe = Connection(forked.PIPE)
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        except Exception as e:
            # A function that cannot be imported here.
            pipe.send(((type(e).__name__, traceback.format_exc()), None))
            continue
        try:
            reply = (None, function(*args))
        except BaseException as e:
            reply = ((type(e).__name__, traceback.format_exc()), None)
        try:
            pipe.send(reply)
        except Exception:
            pipe.send((("PicklingError", traceback.format_exc()), None))
