"""The servers that ``load`` starts and measures, and the description of a server."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_hypic.primitives.tokens import PrimitiveTexts

from .lib.serving import Server
from .trace import Content, Trace

STOCK, HYPIC = "stock", "hypic"
CONTEXT_STEP = 1024
"""The servers' context is what the trace needs, rounded up to a multiple of this."""


@dataclass(frozen=True)
class Spec:
    """A server to be measured: where, and the text of its separator (``None``: prompts without)."""

    name: str
    url: str
    separator: str | None
    command: str | None = None
    """How it was started, where we did."""


@dataclass(frozen=True)
class ServeSettings:
    """How the servers are started; everything that is not named here is vLLM's default."""

    model: Path
    threads: int
    eager: bool
    cache_bytes: int
    pool_bytes: int
    """Part of ``cache_bytes`` that the pool takes with the plugin."""
    hypic: dict[str, Any]
    """The plugin's other options."""
    stock: tuple[str, ...] = ("",)
    """Further arguments of stock vLLM, by server."""


@contextmanager
def serving(settings: ServeSettings, trace: Trace, console: Console) -> Iterator[list[Spec]]:
    """Run all servers.  Raises :class:`ServerError` when a server does not start."""
    context = -(-(trace.longest(token_counter(settings.model, trace)) + 64) // CONTEXT_STEP) * CONTEXT_STEP
    common = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    common += ["--max-model-len", str(context), *(["--enforce-eager"] if settings.eager else [])]
    options = {"pool_bytes": settings.pool_bytes, **settings.hypic}
    own = {
        f"{STOCK} {more}".rstrip(): ["--kv-cache-memory-bytes", str(settings.cache_bytes), *shlex.split(more)]
        for more in settings.stock
    }
    own[HYPIC] = [
        *("--kv-cache-memory-bytes", str(settings.cache_bytes - settings.pool_bytes)),
        *("--attention-backend", "hypic", "--additional-config", json.dumps({"hypic": options})),
    ]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.threads < len(os.sched_getaffinity(0)):  # by default vLLM binds a thread to each core
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    with ExitStack() as stack:
        specs, logs = [], []
        for name, arguments in own.items():
            # Without plugins the stock server is stock to the last import.
            mine = env | ({} if name == HYPIC else {"VLLM_PLUGINS": ""})
            server = Server(settings.model, *common, *arguments, env=mine, start_timeout_s=1200)
            with console.status(f"starting {name}"):
                stack.enter_context(server)
            logs.append(server.log)
            words = [settings.model.name if w == str(settings.model) else w for w in server.command]
            separator = PrimitiveTexts().sep if name == HYPIC else None
            specs.append(Spec(name, server.url, separator, shlex.join(words)))
            console.print(specs[-1].command, soft_wrap=True, style="dim")
        try:
            yield specs
        except BaseException:
            console.print(f"logs of the servers: {' '.join(map(str, logs))}", soft_wrap=True)
            raise
    for log in logs:
        log.unlink(missing_ok=True)


def token_counter(model: Path, trace: Trace) -> Callable[[Content], int]:
    """Counts a content's tokens as the model's tokenizer does, separators left out."""
    if trace.form == "tokens":
        return len
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    known: dict[Content, int] = {}

    def count(content: Content) -> int:
        if content not in known:
            # What is put between texts takes a token or two.
            known[content] = len(tokenizer(str(content))["input_ids"]) + 2
        return known[content]

    return count
