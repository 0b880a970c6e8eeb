"""Records that come from elsewhere, or go there: bit for bit the pool's.  The test is the other instance."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lib.oracle.models import random_segments

from benchmarks.lib.processes import free_port
from vllm_hypic.segment_parallel.notifier import withdraw
from vllm_hypic.segment_parallel.permits import Permits, Subject
from vllm_hypic.segment_parallel.receiver import Receiver
from vllm_hypic.segment_parallel.sender import Sender, Sent
from vllm_hypic.store.protocol import Verdict

from .conftest import EngineFactory, lent
from .engines import SEP, Answer, Ask, Engine, plan_of, prompt, same, scheduler_of
from .staged_copies import staged
from .test_store import computed, forget

LEAD, ONE, TWO, QUESTION = random_segments([90, 150, 200, 40], seed=45)
BOUND_S = 60.0


def permitted(tokens: tuple[int, ...], extra: dict[str, Any]) -> dict[str, Any]:
    """The options as a router signs them."""
    return {**extra, "hypic_permit": Permits.read(None).issue(extra, Subject(tokens, None))}


def ask(**extra: Any) -> Ask:
    tokens = prompt(ONE, TWO, query=QUESTION, lead=LEAD)
    return Ask(tokens, extra=permitted(tokens, extra))


def warm_up(**extra: Any) -> Ask:
    """The same segments without a question."""
    tokens = (*LEAD, SEP, *ONE, SEP, *TWO, SEP)
    return Ask(tokens, max_tokens=1, extra=permitted(tokens, extra))


def names(llm: Any) -> dict[str, str]:
    """Keys of the segments by the names of their objects."""
    return {f"{s.key}.0-1": s.key for s in plan_of(llm, ask().tokens).segments}


def namespace(llm: Any) -> str:
    return scheduler_of(llm).hypic.namespace.digest


def place() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def instance(here: str) -> dict[str, Any]:
    """Options of an engine that lets records land there."""
    return {"segment_parallel": {"listen": here, "events": place()}}


here = pytest.fixture(place, scope="module", name="here")


@pytest.fixture(scope="module")
def _engine(module_engine: EngineFactory, hybrid_model: Path, here: str) -> Engine:
    return module_engine(hybrid_model, options=instance(here))


engine = lent("_engine", lambda engine: engine.call(forget))


@pytest.fixture(scope="module")
def records(_engine: Engine) -> dict[str, bytes]:
    """The prompt's records as the engine pushes them."""
    _engine.call(forget)
    return pushed(_engine)


def pushed(engine: Engine) -> dict[str, bytes]:
    """The prompt's records, computed if need be, as they arrive elsewhere; by the names of their objects."""
    taken: dict[str, bytes] = {}
    there = place()
    with closing(Receiver(there, engine.call(namespace), None, 1 << 26)) as receiver:
        for name in engine.call(names):

            def read(data: memoryview, name: str = name) -> Verdict:
                taken[name] = bytes(data)
                return Verdict.TAKEN

            receiver.expect(name, 1 << 26, read)
        (answer,) = engine.ask(warm_up(hypic_push_to=there, hypic_push_deadline_s=BOUND_S))
        assert answer.reasons == ("stop",) and len(taken) == 3, "it ends when all have arrived"
        assert {received.name for received in receiver.poll()} == set(taken)
        # Again, from the pool: nothing is computed, and the receiver has them.
        before = engine.call(computed)
        (answer,) = engine.ask(warm_up(hypic_push_to=there))
        assert answer.reasons == ("stop",) and engine.call(computed) == before
    return taken


@contextmanager
def waiting(engine: Engine, *asks: Ask) -> Iterator[Future[list[Answer]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(engine.ask, *asks)


def push(sender: Sender, here: str, objects: dict[str, bytes]) -> list[Sent]:
    found, deadline = list[Sent](), time.monotonic() + BOUND_S
    for name, data in objects.items():
        sender.send(name, memoryview(data), here, BOUND_S)
    while len(found) < len(objects):
        assert time.monotonic() < deadline
        found += sender.poll()
        time.sleep(0.005)
    return found


def sending(engine: Engine) -> closing[Sender]:
    return closing(Sender(engine.call(namespace), None))


def landed(engine: Engine, here: str, objects: dict[str, bytes], *more: Ask) -> list[Answer]:
    """The answers to the prompt and to ``more`` while its records are pushed; none is computed here."""
    before, keys = engine.call(computed), list(engine.call(names).values())
    with sending(engine) as sender, waiting(engine, ask(hypic_remote=keys), *more) as answers:
        sent = push(sender, here, objects)
        assert all(one.delivered for one in sent), sent
        found = answers.result(BOUND_S)
    assert engine.call(computed) == before, "a segment was computed here"
    return found


def test_records_leave_and_land_by_staged_copies(
    engine: Engine, here: str, records: dict[str, bytes]
) -> None:
    """As on a device: the same bytes, the same answer."""
    with staged(engine):
        assert pushed(engine) == records
    (cold,) = engine.ask(ask())
    engine.call(forget)
    with staged(engine):
        assert same(*landed(engine, here, records), cold)


def test_a_received_record_equals_the_pools(engine: Engine, here: str, records: dict[str, bytes]) -> None:
    (cold,) = engine.ask(ask())
    engine.call(forget)
    before = engine.call(computed)
    remote, plain = landed(engine, here, records, Ask(QUESTION))
    assert same(remote, cold) and len(plain.tokens) == 8
    (warm,) = engine.ask(ask())
    assert same(warm, cold) and engine.call(computed) == before, "they stay like any others"


def test_what_does_not_come_or_is_damaged_is_computed(
    engine: Engine, here: str, records: dict[str, bytes]
) -> None:
    (cold,) = engine.ask(ask())
    engine.call(forget)
    before = engine.call(computed)
    by_key = {key: name for name, key in engine.call(names).items()}
    good, damaged, withdrawn = by_key
    hurt = bytearray(records[by_key[damaged]])
    hurt[len(hurt) // 2] ^= 1
    space, asked = engine.call(namespace), ask(hypic_remote=list(by_key), hypic_remote_deadline_s=4)
    with sending(engine) as sender, waiting(engine, asked) as answers:
        (sent,) = push(sender, here, {by_key[good]: records[by_key[good]]})
        assert sent.delivered
        (sent,) = push(sender, here, {by_key[damaged]: bytes(hurt)})
        assert not sent.delivered and sent.reason
        withdraw(here, space, [by_key[withdrawn]], None, BOUND_S)
        (answer,) = answers.result(BOUND_S)
    assert same(answer, cold)
    assert engine.call(computed) == before + 2, "the damaged one and the one withdrawn"


def test_a_record_that_cannot_be_delivered_ends_its_request_with_an_error(engine: Engine) -> None:
    """Nobody listens there, or it is another machine."""
    for there in (place(), "tcp://192.0.2.1:7100"):
        (answer,) = engine.ask(warm_up(hypic_push_to=there, hypic_push_deadline_s=1))
        assert answer.reasons == ("error",)
    (answer,) = engine.ask(ask())
    assert answer.reasons == ("length",) and answer.cached > 0, "the records are there"


def test_after_a_reset_records_go_and_come_under_other_names(
    module_engine: EngineFactory, hybrid_model: Path, records: dict[str, bytes]
) -> None:
    here = place()
    engine = module_engine(hybrid_model, options=instance(here))
    before = list(engine.call(names).values())
    engine.reset()
    started = time.monotonic()
    (answer,) = engine.ask(ask(hypic_remote=before))
    assert answer.cached == 0 and answer.reasons == ("length",)
    assert time.monotonic() - started < BOUND_S, "at once, not after the deadline of 120 s"
    own = pushed(engine)
    assert not own.keys() & records.keys()
    (cold,) = engine.ask(ask())
    engine.call(forget)
    assert same(*landed(engine, here, own), cold)
