"""Time to first token: stock vLLM, a cold and a warm request of cached segments, side by side.

Two engines (stock, hypic) live in processes of their own at the same time; only one works at a time
and they take turns, prompt by prompt, so that the machine's moods hit both.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROMPT_TAIL = 32
"""Tokens of the question after the last segment."""


@dataclass(frozen=True)
class TtftSettings:
    """One benchmark: ``segments`` cached segments of ``tokens`` tokens each."""

    model: Path
    segments: int
    tokens: int
    repeats: int
    threads: int
    compiled: bool = False
    seed: int = 0


@dataclass(frozen=True)
class TtftResult:
    """Seconds to first token of every repeat."""

    stock: list[float]
    cold: list[float]
    warm: list[float]
    reused_tokens: int
    prompt_tokens: int

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name))

    @property
    def speedup(self) -> float:
        """Stock over warm, medians."""
        return self.median("stock") / self.median("warm")


class GateFailed(RuntimeError):
    """The engine's answers are wrong: no time is reported."""


def run(settings: TtftSettings, progress: Any = None) -> TtftResult:
    """Measure; raises :class:`GateFailed` when warm and cold answers differ."""
    stock, hypic = _Engine(settings, hypic=False), _Engine(settings, hypic=True)
    try:
        rng = random.Random(settings.seed)
        separator = hypic.start()
        stock.start()
        vocabulary = hypic.ask("vocabulary")

        def words(n: int) -> list[int]:
            return [rng.randrange(4, vocabulary) for _ in range(n)]

        times: dict[str, list[float]] = {"stock": [], "cold": [], "warm": []}
        reused = 0
        for repeat in range(settings.repeats + 1):  # the first is a warm-up
            documents = [words(settings.tokens) for _ in range(settings.segments)]
            head, tail = words(64), words(PROMPT_TAIL)
            marked = [*head, separator]
            for document in documents:
                marked += [*document, separator]
            plain = [t for t in marked if t != separator] + tail
            measured = {
                "stock": stock.ask("first_token", plain),
                "cold": hypic.ask("first_token", marked + tail),
                "warm": hypic.ask("first_token", marked + tail),
            }
            if measured["cold"].logprobs != measured["warm"].logprobs:
                raise GateFailed("a warm request's logprobs differ from the same request cold")
            reused = measured["warm"].cached
            if reused < settings.segments * (settings.tokens - 16):
                raise GateFailed(f"only {reused} tokens were reused")
            if repeat:
                for name, one in measured.items():
                    times[name].append(one.seconds)
            if progress is not None:
                progress(repeat)
        return TtftResult(**times, reused_tokens=reused, prompt_tokens=len(plain))
    finally:
        stock.stop()
        hypic.stop()


@dataclass(frozen=True)
class _FirstToken:
    seconds: float
    logprobs: dict[int, float]
    cached: int


class _Engine:
    """One engine in a process of its own, told what to do over a pipe."""

    def __init__(self, settings: TtftSettings, *, hypic: bool) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(settings, hypic, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self) -> int:
        """Wait until the engine is up; the separator's id (or -1)."""
        return self._answer()

    def ask(self, what: str, *args: Any) -> Any:
        self.pipe.send((what, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError as e:
            raise GateFailed("an engine process died; its log is above") from e

    def stop(self) -> None:
        if self.process.is_alive():
            try:
                self.pipe.send(("stop", ()))
                self.process.join(20)
            except OSError:
                pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(settings: TtftSettings, hypic: bool, pipe: Connection) -> None:
    """Body of an engine process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS=str(settings.threads))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    length = settings.segments * settings.tokens + 1024
    options: dict[str, Any] = {"attention_backend": "hypic"} if hypic else {}
    llm = LLM(
        model=str(settings.model),
        enforce_eager=not settings.compiled,
        dtype="bfloat16",
        max_model_len=length,
        max_num_batched_tokens=length,
        **options,
    )
    separator = -1
    if hypic:
        from ..tokenizer import primitive_ids

        separator = primitive_ids(llm.get_tokenizer()).sep
    pipe.send(separator)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    while True:
        what, args = pipe.recv()
        if what == "stop":
            return
        if what == "vocabulary":
            pipe.send(min(llm.model_config.get_vocab_size(), 50_000) - 64)
            continue
        begin = time.perf_counter()
        answer = llm.generate([{"prompt_token_ids": args[0]}], params, use_tqdm=False)[0]
        seconds = time.perf_counter() - begin
        logprobs = answer.outputs[0].logprobs
        assert logprobs is not None
        pipe.send(
            _FirstToken(
                seconds,
                {token: value.logprob for token, value in logprobs[0].items()},
                answer.num_cached_tokens or 0,
            )
        )
