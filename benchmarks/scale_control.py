"""What router and directory can do, measured on this machine: one process, one core each."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import random
import ssl
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
from rich.console import Console

from vllm_hypic.harness.report import table
from vllm_hypic.segment_parallel.router.assign import assign

from .lib.report import seconds

WORKERS, SEGMENTS, TOKENS = 64, 32, 1900
NAMES = 1_000_000
POSTS = 512
AT_ONCE = (8, 32, 128, 512)
ONE, EACH, AIOHTTP = "httpx, one client", "httpx, a client per worker", "aiohttp, one session"
CLIENTS = (ONE, EACH, AIOHTTP)


@dataclass(frozen=True)
class Posting:
    """How many segments an asyncio process sends out, as JSON, to a server that answers at once."""

    client: str
    at_once: int
    """Requests that are open at a time."""
    per_s: float


@dataclass(frozen=True)
class Control:
    assign_s: float
    """Best of several: ``lpt.assign`` of 32 segments to 64 workers."""
    names_per_s: float
    """Events: decoded and applied to a directory's view, in messages of 32 names."""
    wire_bytes_per_name: float
    memory_bytes_per_name: float
    """A set of names in Python, names included."""
    postings: tuple[Posting, ...]

    def show(self, to: Console) -> None:
        to.print(
            f"assigning {SEGMENTS} segments to {WORKERS} workers: {seconds(self.assign_s)}; directory: "
            f"{self.names_per_s:,.0f} names/s, {self.wire_bytes_per_name:.0f} bytes each on the wire, "
            f"{self.memory_bytes_per_name:.0f} in memory"
        )
        rates = {(posting.client, posting.at_once): posting.per_s for posting in self.postings}
        counts = sorted({posting.at_once for posting in self.postings})
        to.print(
            table(
                f"segments of {TOKENS} tokens sent out a second, by requests that are open at once",
                ("client", *map(str, counts)),
                [(client, *(f"{rates[client, n]:,.0f}" for n in counts)) for client in CLIENTS],
            )
        )


def control_plane(
    names: int = NAMES, posts: int = POSTS, at_once: Sequence[int] = AT_ONCE, workers: int = WORKERS
) -> Control:
    """About a minute."""
    wire, rate = _directory(names)
    return Control(
        assign_s=_assign_s(),
        names_per_s=rate,
        wire_bytes_per_name=wire,
        memory_bytes_per_name=_memory(names),
        postings=_postings(posts, at_once, workers),
    )


def _assign_s() -> float:
    source = random.Random(0)
    costs = [source.randint(256, 8192) for _ in range(SEGMENTS)]
    loads = [source.randint(0, 20000) for _ in range(WORKERS)]
    return _best(lambda: assign(costs, loads), 1000)


def _best(act: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(times):
            act()
        best = min(best, (time.perf_counter() - begin) / times)
    return best


def _name(i: int) -> str:
    return hashlib.sha256(i.to_bytes(8)).hexdigest()


def _directory(names: int) -> tuple[float, float]:
    """Bytes of a name on the wire, and names a second."""
    from vllm_hypic.segment_parallel.events_wire import ALL, Changes, decode, encode

    frames = []
    for seq, first in enumerate(range(0, names, SEGMENTS), 1):
        some = [_name(i) for i in range(first, min(names, first + SEGMENTS))]
        frames.append(encode(Changes("b" * 32, seq, some, [], [], 1000)))
    resident: set[str] = set()
    pending: set[str] = set()
    begin = time.perf_counter()
    for frame in frames:
        changes = decode((ALL, frame), b"")
        assert isinstance(changes, Changes)
        resident.update(changes.resident)
        resident.difference_update(changes.pending, changes.gone)
        pending.difference_update(changes.resident)
    spent = time.perf_counter() - begin
    return sum(map(len, frames)) / names, names / spent


def _memory(names: int) -> float:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = {_name(i) for i in range(names)}
        return (tracemalloc.get_traced_memory()[0] - before) / len(kept)
    finally:
        tracemalloc.stop()


def _postings(posts: int, at_once: Sequence[int], workers: int) -> tuple[Posting, ...]:
    """Posts to a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        if not ours.poll(60):
            raise TimeoutError("the server to post to has not started within 60 s")
        url = f"http://127.0.0.1:{ours.recv()}/v1/completions"
        source = random.Random(0)
        tokens = [source.randint(0, 150_000) for _ in range(TOKENS)]
        return tuple(
            Posting(client, n, asyncio.run(_rate(client, workers, url, tokens, n, max(1, posts // n))))
            for client in CLIENTS
            for n in at_once
        )
    finally:
        server.terminate()
        server.join(10)


async def _rate(client: str, workers: int, url: str, tokens: list[int], at_once: int, each: int) -> float:
    async with AsyncExitStack() as open_clients:
        posts = await _senders(client, workers, open_clients)

        async def some(i: int, n: int) -> None:
            for _ in range(n):
                body = msgspec.json.encode({"prompt": tokens, "max_tokens": 1})
                msgspec.json.decode(await posts[i % len(posts)](url, body))

        await asyncio.gather(*(some(i, 1) for i in range(at_once)))  # connections are open from here
        begin = time.perf_counter()
        await asyncio.gather(*(some(i, each) for i in range(at_once)))
        return at_once * each / (time.perf_counter() - begin)


async def _senders(
    client: str, workers: int, until: AsyncExitStack
) -> list[Callable[[str, bytes], Awaitable[bytes]]]:
    headers = {"Content-Type": "application/json"}
    if client == AIOHTTP:
        import aiohttp

        session = await until.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )

        async def by_aiohttp(url: str, body: bytes) -> bytes:
            async with session.post(url, data=body, headers=headers) as answer:
                return await answer.read()

        return [by_aiohttp]
    import httpx

    def by_httpx(http: httpx.AsyncClient) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def post(url: str, body: bytes) -> bytes:
            return (await http.post(url, content=body, headers=headers)).content

        return post

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    tls = ssl.create_default_context()  # not used; made once, not once a client
    found = []
    for _ in range(1 if client == ONE else workers):
        http = httpx.AsyncClient(limits=limits, timeout=60.0, trust_env=False, verify=tls)
        found.append(by_httpx(await until.enter_async_context(http)))
    return found


def _serve(pipe: Connection) -> None:
    """Answers every request at once; reads no more of it than it must."""
    body = json.dumps({"choices": [{"text": "x"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                [length] = [
                    int(line[15:])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ]
                await reader.readexactly(length)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())
