"""``python -m examples.demo``: the real server on the demo model, stock and with this plugin.

Each task is a question over documents that are sent in three orders.  To stock vLLM every order is a new
prompt; with hypic the first order computes the documents (cold) and later orders reuse them (warm).  The demo
prints a table, and exits with 1 if answers are worse than stock's or nothing was reused.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.lib import report
from benchmarks.lib.client import Answer, ask
from benchmarks.lib.serving import Server, ServerError
from vllm_hypic.harness.generators import EXAMPLE, FIRST_SEED, find_generator, words_of
from vllm_hypic.primitives.builder import build_messages, build_prompt
from vllm_hypic.primitives.tokens import PrimitiveTexts

ORDERS = 3
WARM_UP_TASKS = 3
ANSWER_TOKENS = 8
TEXTS = PrimitiveTexts()
SURFACES = ("completion", "token ids", "chat")
LOSS_ALLOWED = 0.1
"""Share of answers that may be right with stock vLLM and wrong with hypic before the demo fails."""

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Task:
    """A question over documents, as texts."""

    system: str
    documents: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """A task with its documents in an order, sent in the way ``surface``; ``cut`` puts separators between
    segments."""

    task: Task
    order: tuple[int, ...]
    surface: str
    cut: bool

    def request(self, token_ids: Callable[[str], list[int]]) -> tuple[str, dict[str, object]]:
        """Return path and body of the HTTP request."""
        body: dict[str, object] = {"max_tokens": ANSWER_TOKENS, "temperature": 0}
        task, documents = self.task, [self.task.documents[i] for i in self.order]
        if self.surface == "chat":
            messages = build_messages(documents=documents, question=task.question, system=task.system)
            messages = [{**m, "content": self._uncut(m["content"])} for m in messages]
            return "/v1/chat/completions", {**body, "messages": messages}
        # The chat template writes the same text before the documents.
        prompt = build_prompt(system=f"<bos> <sys> {task.system}", segments=documents, query=task.question)
        prompt = self._uncut(prompt)
        return "/v1/completions", {
            **body,
            "prompt": prompt if self.surface == "completion" else token_ids(prompt),
        }

    def _uncut(self, text: str) -> str:
        return text if self.cut else text.replace(TEXTS.sep, " ").strip()


@dataclass(frozen=True)
class Result:
    """An answer to a prompt."""

    prompt: Prompt
    answer: Answer

    @property
    def right(self) -> bool:
        return self.answer.text.split() == self.prompt.task.answer.split()


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if not (EXAMPLE / "model").is_dir():
        console.print(f"The demo model is not at {EXAMPLE}: run the demo from a checkout of the repository.")
        return 2
    shape = (options.documents, options.document_tokens)
    warm_up = make_tasks(options.tasks, WARM_UP_TASKS, *shape)
    tasks = make_tasks(0, options.tasks, *shape)
    console.print(
        f"{len(tasks)} questions, each over {shape[0]} documents of {shape[1]} tokens in {ORDERS} orders,\n"
        "sent as completion, token ids and chat. One server at a time."
    )
    try:
        with serving("stock vLLM") as server:
            run(server, warm_up, cut=False)
            stock = run(server, tasks, cut=False)
        with serving("vLLM with hypic", "--attention-backend", "hypic") as server:
            run(server, warm_up, cut=True)
            before = server.wait_for_metrics(lambda m: not m["vllm:hypic_pinned"])
            hypic = run(server, tasks, cut=True)
            after = server.wait_for_metrics(
                lambda m: (
                    m["vllm:hypic_requests_total"] - before["vllm:hypic_requests_total"] == len(hypic)
                    and not m["vllm:hypic_pinned"]
                )
            )
    except ServerError as e:
        console.print(f"[bold red]failed:[/] {e}")
        return 1
    # run() goes order by order, so that every task's first order is cold.
    cold, warm = hypic[: len(tasks)], hypic[len(tasks) :]
    console.print(table({"stock vLLM": stock, "hypic, cold": cold, "hypic, warm": warm}))
    report_metrics({name: after[name] - before.get(name, 0.0) for name in after})
    faults = check(stock, cold, warm)
    for fault in faults:
        console.print(f"[bold red]failed:[/] {fault}")
    if not faults:
        console.print("[bold green]passed:[/] documents were reused in every order, and the answers hold.")
    return 1 if faults else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--tasks", type=int, default=9, help="questions; each is asked in three orders")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=512)
    return parser.parse_args(argv)


def make_tasks(first: int, count: int, documents: int, document_tokens: int) -> list[Task]:
    """Return the tasks ``first``, ``first + 1``, ..., which are the same in every run."""
    gen = find_generator(EXAMPLE / "model")
    assert gen is not None, f"{EXAMPLE} has no generator"
    text = partial(words_of, gen)
    tasks = []
    for i in range(first, first + count):
        kind = gen.LEARNED[i % len(gen.LEARNED)]
        parts = gen.prompt(FIRST_SEED + i, documents, document_tokens, kind, facts=gen.FACTS)
        tasks.append(
            Task(
                system=text(parts["system"][2:]),  # without <bos> <sys>
                documents=tuple(map(text, parts["docs"])),
                question=text(parts["question"]),
                answer=text(parts["answer"][:-1]),  # without <eos>
            )
        )
    return tasks


@contextmanager
def serving(title: str, *options: str) -> Iterator[Server]:
    """Run a server on the demo model; raise :class:`ServerError` if a process survives the ``with`` block."""
    here = Path.cwd()
    folder = EXAMPLE.relative_to(here) if EXAMPLE.is_relative_to(here) else EXAMPLE
    server = Server(
        folder / "model",
        *options,
        *("--chat-template", str(folder / "chat_template.jinja")),
        *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--max-model-len", "16384", "--kv-cache-memory-bytes", "1G", "--disable-uvicorn-access-log"),
        env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    console.print(f"\n[bold]{title}[/]  {' '.join(server.command)}", soft_wrap=True)
    with server:
        processes = server.processes()
        yield server
    server.log.unlink()
    if left := [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        raise ServerError(f"{title}: processes {left} are still alive")


def run(server: Server, tasks: Sequence[Task], *, cut: bool) -> list[Result]:
    """Send all tasks in their first order, then all tasks in the second, and so on, one request at a time.

    The ways of sending rotate, so that each order of documents is sent in every way.
    """

    def token_ids(prompt: str) -> list[int]:
        response = httpx.post(
            f"{server.url}/tokenize", json={"prompt": prompt}, timeout=60
        ).raise_for_status()
        ids: list[int] = response.json()["tokens"]
        return ids

    results = []
    with report.progress(console, ORDERS * len(tasks)) as steps:
        for turn, (i, task) in itertools.product(range(ORDERS), enumerate(tasks)):
            order, surface = orders(i, len(task.documents))[turn], SURFACES[(i + turn) % len(SURFACES)]
            prompt = Prompt(task, order, surface, cut)
            path, body = prompt.request(token_ids)
            results.append(Result(prompt, ask(server.url, path, body)))
            steps.done()
    return results


def orders(seed: int, n: int) -> list[tuple[int, ...]]:
    """Return ``ORDERS`` orders of ``n`` documents, which differ unless ``n`` documents have fewer orders."""
    rng = random.Random(seed)
    found = [tuple(range(n))]
    while len(found) < min(ORDERS, math.factorial(n)):
        order = tuple(rng.sample(range(n), n))
        if order not in found:
            found.append(order)
    return list(itertools.islice(itertools.cycle(found), ORDERS))


def table(columns: dict[str, list[Result]]) -> Table:
    """Return the table of measurements, with a column for each kind of request."""
    rows: list[tuple[str, Callable[[list[Result]], str]]] = [
        ("requests", lambda r: str(len(r))),
        ("time to first token, median", lambda r: f"{1000 * _median(r):.0f} ms"),
        ("prompt tokens, mean", lambda r: _mean(r, lambda a: a.prompt_tokens)),
        ("  reused", lambda r: _mean(r, lambda a: a.cached_tokens)),
        ("  recomputed", lambda r: _mean(r, lambda a: a.prompt_tokens - a.cached_tokens)),
        ("answers right of asked", _score),
        *(
            (f"  sent as {s}", lambda r, s=s: _score([x for x in r if x.prompt.surface == s]))
            for s in SURFACES
        ),
    ]
    told = [(name, *(value(results) for results in columns.values())) for name, value in rows]
    return report.table("measured", ("", *columns), told)


def report_metrics(counts: dict[str, float]) -> None:
    """Print the numbers that the server's own ``/metrics`` counted over cold and warm requests."""
    shown = (
        "segments_queried",
        "segments_hit",
        "segments_computed",
        "tokens_reused",
        "tokens_computed",
        "seam_tokens",
    )
    values = ", ".join(f"{name} {counts[f'vllm:hypic_{name}_total']:.0f}" for name in shown)
    console.print(f"/metrics, vllm:hypic_*: {values}.")
    console.print(
        "A model of 1.9 million parameters shows that answers hold and that documents are reused; its times\n"
        "are mostly overhead per request. For speed on a larger model: python -m benchmarks ttft"
    )


def check(stock: list[Result], cold: list[Result], warm: list[Result]) -> list[str]:
    """Return the faults of these results, an empty list if all is well."""
    faults = []
    least = _share(stock) - LOSS_ALLOWED
    for name, results in (("cold", cold), ("warm", warm)):
        if _share(results) < least:
            faults.append(f"{name} requests: {_score(results)} right, stock vLLM: {_score(stock)}")
    if not any(r.right for r in stock):
        faults.append("no answer of stock vLLM is right: the comparison says nothing")
    if missed := sum(r.answer.cached_tokens == 0 for r in warm):
        faults.append(f"{missed} of {len(warm)} warm requests reused nothing")
    if reused := sum(r.answer.cached_tokens > 0 for r in cold):
        faults.append(f"{reused} of {len(cold)} cold requests reused tokens: expected none")
    return faults


def _median(results: list[Result]) -> float:
    return statistics.median(r.answer.first_token_s for r in results)


def _mean(results: list[Result], value: Callable[[Answer], int]) -> str:
    return f"{statistics.mean(value(r.answer) for r in results):.0f}"


def _share(results: list[Result]) -> float:
    return sum(r.right for r in results) / len(results)


def _score(results: list[Result]) -> str:
    return f"{sum(r.right for r in results)} of {len(results)}"
