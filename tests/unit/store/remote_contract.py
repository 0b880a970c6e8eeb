"""What a tier must do whose server is a process of its own, which others reach, too."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from benchmarks.services import Service
from vllm_hypic.store.tiers.base import Tier, TierError

from .awkward_tiers import PATIENCE_S, wait_for
from .conftest import WallClock
from .tier_contract import THREADS, SurvivesRestart, TierContract, content, got, in_threads, name, put

Connect = Callable[..., Any]


@contextmanager
def connections(make: Callable[..., Tier], name: str, url: str) -> Iterator[Connect]:
    """Makes tiers, open unless ``opened`` says otherwise; all are closed in the end."""
    with ExitStack() as stack:

        def connect(name: str = name, url: str = url, *, opened: bool = True, **options: object) -> Tier:
            tier = make(name, url, **options)
            stack.callback(tier.close)
            if opened:
                tier.open()
            return tier

        yield connect


class OnWallClock(TierContract):
    """Of tiers whose time cannot be set."""

    tick = 0.25

    @pytest.fixture
    def clock(self) -> WallClock:
        return WallClock()


class RemoteContract(OnWallClock, SurvivesRestart):
    """Fixtures of the subclass, or of its module:

    ``server``: it runs, and what was put survives it.
    ``connect``: see :func:`connections`.
    ``tier``: open and empty.
    """

    @pytest.fixture
    def reopen(self, server: Service, connect: Connect):
        """The tier and the server are started anew, the server after ``kill -9``."""

        def again(tier: Tier) -> Tier:
            tier.close()
            server.kill()
            server.start()
            return connect()

        return again

    def operations(self, tier: Tier) -> list[Callable[[], object]]:
        """All that need the server."""
        return [
            lambda: got(tier, 1),
            lambda: put(tier, 2, 100),
            lambda: tier.delete(name(1)),
            lambda: tier.expire(name(1), None),
            tier.used,
            tier.clear,
        ]

    def test_a_killed_server_fails_until_restarted(self, tier: Tier, connect: Connect, server: Service):
        """Of a tier that is open, and of one that is to be opened."""
        data = put(tier, 1, 1_000_000)
        newcomer = connect(opened=False)
        server.kill()
        with pytest.raises(TierError, match="refused"):
            newcomer.open()
        with pytest.raises(TierError, match="not open"):
            got(newcomer, 1)
        for operation in (newcomer.open, *self.operations(tier)):
            with pytest.raises(TierError, match=f"127.0.0.1:{server.port}"):
                operation()
        assert tier.may_hold(name(1))
        server.start()
        assert got(tier, 1) == data
        newcomer.open()
        for mended in (tier, newcomer):
            assert put(mended, 2, 100) == got(mended, 2)

    def test_a_hanging_server_is_an_error_in_time(self, tier: Tier, connect: Connect, server: Service):
        hasty = connect(timeout_s=2.0)
        data = put(tier, 1, 1000)
        assert got(hasty, 1) == data
        server.pause()
        try:
            # No other test uses object 29, which may come late.
            for operation in (lambda: got(hasty, 1), lambda: put(hasty, 29, 1000)):
                with pytest.raises(TierError, match=r"(?i)timeout"):
                    operation()
        finally:
            server.resume()

        def mended() -> bool:
            with suppress(TierError):
                return got(hasty, 1) == data
            return False

        wait_for(mended, "it answers again")

    def test_threads_see_only_tier_errors_of_a_kill(self, tier: Tier, connect: Connect, server: Service):
        """Every object read is whole; afterwards the same tier works, and has all whose put returned."""
        hasty = connect(timeout_s=2.0)
        stop, lost = threading.Event(), threading.Event()
        stored: set[int] = set()

        def work(seed: int) -> None:
            i = seed
            while not stop.is_set():
                try:
                    put(hasty, i, 50_000)
                    stored.add(i)
                    assert got(hasty, i) in (None, content(i, 50_000))
                    i += THREADS
                except TierError:
                    lost.set()
                    time.sleep(0.05)

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(in_threads, work)
            try:
                wait_for(lambda: len(stored) >= 2 * THREADS or working.done(), "a few puts by each thread")
                server.kill()
                assert lost.wait(PATIENCE_S)
                server.start()  # here: the server ends with the thread that starts it
            finally:
                stop.set()
            working.result()
        assert all(got(hasty, i) == content(i, 50_000) for i in stored)

    def test_clients_share_a_namespace_and_namespaces_are_apart(self, tier: Tier, connect: Connect):
        same, apart = connect(), connect(namespace="b")
        data = put(tier, 1, 1000)
        assert got(same, 1) == data and got(apart, 1) is None
        put(apart, 1, 50)
        apart.clear()
        assert got(tier, 1) == data and got(apart, 1) is None
