"""Many clients, few records in memory, and servers behind it that die again and again."""

from __future__ import annotations

import random
import time

import pytest

from vllm_hypic.demo.single import Task

from .asking import Clients, ask_right
from .conftest import Stand
from .observing import FILE_HEAD, check_record, files_of, partials_of, settled, tiers_when

CLIENTS = 8
DEATHS = ("redis", "lmcache", "redis")


@pytest.mark.slow
def test_answers_and_books_hold_while_servers_die_and_come_back(stand: Stand) -> None:
    rng = random.Random(17)
    known = stand.questions.new(16)
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    chooser = [random.Random(seed) for seed in range(CLIENTS)]
    before = settled(stand.server)

    def choose(client: int) -> Task:
        rare = chooser[client].random() < 0.1
        return stand.questions.one() if rare else chooser[client].choices(known, weights)[0]

    with Clients(stand.server, choose, threads=CLIENTS) as clients:
        for name in DEATHS:
            service = stand.redis if name == "redis" else stand.lmcache
            clients.wait_for(rng.randint(4, 12))
            service.kill()
            time.sleep(rng.uniform(0, 1.5))
            service.start()
            assert not clients.wrong, clients.wrong[:5]
        # How many questions that takes is left to chance; LMCache is asked for what these two have lost.
        read = ("disk", "redis")
        tiers_when(
            stand.server,
            lambda found: all(found[tier]["hits"] > before[tier]["hits"] for tier in read),
            f"records are read from {read}",
        )
    for tier in ("redis", "lmcache"):
        stand.recover(tier)
    settled(stand.server)
    check_books(stand)
    ask_right(stand.server, *known)


def check_books(stand: Stand) -> None:
    """Whatever lies in a tier is whole, and the server knows what it has."""
    folder = stand.records
    found = tiers_when(
        stand.server, lambda t: t["disk"]["objects"] == len(files_of(folder)), "files are what is booked"
    )
    files = files_of(folder)
    assert found["disk"]["bytes_used"] == sum(f.stat().st_size - FILE_HEAD for f in files.values())
    assert not partials_of(folder)
    for path in files.values():
        check_record(path.read_bytes()[FILE_HEAD:])
    with stand.redis.client() as redis:
        names = redis.keys("hypic:*")
        assert names
        for name in names:
            check_record(redis.get(name))
