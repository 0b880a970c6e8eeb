"""Both ends refuse a peer without the secret, over real sockets.  A permit lets its holder send and await the
records of a signed request for a minute."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_hypic.errors import ConfigError
from vllm_hypic.primitives.options import LinkDefaults, link_of_request
from vllm_hypic.primitives.policies import LinkError
from vllm_hypic.segment_parallel.notifier import withdraw
from vllm_hypic.segment_parallel.permits import LIFETIME_S, Permits, Subject
from vllm_hypic.segment_parallel.secret import Secret, _verdict, secret_of

from .peers import ANY_PORT, DATA, A, Outgoing, Owner

RIGHT, WRONG = Secret(b"right" * 8), Secret(b"wrong" * 8)


def test_a_file_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("k" * 32 + "\n")
    other.write_text(" \n" + "k" * 32)
    secrets = [Secret.read(str(path)) for path in (one, other)]
    assert Secret.read(None) is None
    assert all(secret is not None for secret in secrets)
    with Owner(secret=secrets[0]) as owner, Outgoing(secret=secrets[1]) as outgoing:
        owner.expect(A)
        assert outgoing.deliver(A, b"x" * 100, owner.url).delivered


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a secret of 0 bytes: expected 32 to 65536"),
        (b"k" * 31 + b"\n\n", "a secret of 31 bytes: expected 32 to 65536"),
        (b"k" * 70000, "a secret of 65537 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_secret_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        Secret.read(str(path))
    said = str(refusal.value)
    assert f"segment_parallel.secret_file={str(path)!r}" in said and says in said and "kkkk" not in said


@pytest.mark.parametrize(
    ("server", "client"),
    [(RIGHT, WRONG), (RIGHT, None), (None, RIGHT)],
    ids=["another secret", "no secret", "no secret there"],
)
def test_others_are_kept_out(server: Secret | None, client: Secret | None) -> None:
    with Owner(secret=server) as owner, Outgoing(secret=client) as outgoing:
        owner.expect(A)
        sent = outgoing.deliver(A, DATA, owner.url, deadline_s=0.8)
        said = "no answer (no receiver listens there, or its secret differs) within 0.8 s"
        assert not sent.delivered and sent.reason.startswith(said)
        with pytest.raises(TimeoutError):
            withdraw(owner.url, "ns", [A], client, timeout_s=0.4)
        assert not owner.poll() and not owner.read
        with Outgoing(secret=server) as one_of_us:  # it was not the receiver that was out of order
            assert one_of_us.deliver(A, DATA, owner.url).delivered
        assert owner.wait_for(A)[0].taken


def _server(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    socket = context.socket(zmq.ROUTER)
    RIGHT.serve(socket)
    socket.bind(ANY_PORT)
    return socket


def _client(server: zmq.Socket[Any], key_pair: Any = None, says: bytes = b"hello") -> zmq.Socket[Any]:
    """A client in a context of its own, with the right secret's keys or these."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0
    RIGHT.connect(socket)
    if key_pair is not None:
        socket.curve_publickey, socket.curve_secretkey = key_pair
    socket.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
    socket.send(says)
    return socket


def test_the_servers_public_key_alone_opens_nothing() -> None:
    """Who learned it, from a core dump perhaps, has a key pair of its own: not admitted."""
    with zmq.Context() as context, _server(context) as server:
        stranger = _client(server, zmq.curve_keypair(), b"let me in")
        assert not server.poll(500)
        with stranger, _client(server):
            assert server.poll(10_000) and server.recv_multipart()[1] == b"hello"
            assert not server.poll(0)


@pytest.mark.parametrize("gone", [False, True], ids=["says nothing", "is not there"])
def test_when_nobody_answers_for_a_client_nobody_is_let_in(gone: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as deaf:
        deaf.bind("inproc://zeromq.zap.01")  # in the place of the one who answers
        with _server(context) as server:
            if gone:
                deaf.close()
            with _client(server):
                assert not server.poll(500)


def test_sockets_of_one_context_share_who_answers() -> None:
    with zmq.Context() as context:
        for _ in range(3):
            with _server(context) as server, _client(server):
                assert server.poll(10_000)


@pytest.mark.parametrize(
    "change", [{5: b"NULL"}, {5: b"PLAIN"}, {6: b"k" * 32}, {6: b""}, {2: b"global"}, {0: b"2.0"}]
)
def test_only_the_derived_client_key_is_admitted(change: dict[int, bytes]) -> None:
    key = b"K" * 32
    request = [b"1.0", b"7", b"hypic", b"127.0.0.1", b"", b"CURVE", key]
    assert _verdict(request, key)[:3] == [b"1.0", b"7", b"200"]
    changed = [change.get(i, frame) for i, frame in enumerate(request)]
    assert _verdict(changed, key)[:3] == [b"1.0", b"7", b"400"]
    assert _verdict(request[:6], key)[2] == b"400"


def test_a_secret_does_not_show() -> None:
    assert "right" not in repr(RIGHT) + str(RIGHT)


NOW = 1_800_000_000.5
KEY = "0123456789abcdef" * 4
PUSH: dict[str, Any] = {"hypic_push_to": "tcp://10.0.0.9:7100", "hypic_push_deadline_s": 50.0}
REMOTE: dict[str, Any] = {"hypic_remote": [KEY, KEY[::-1]], "hypic_remote_deadline_s": 50}
SUBJECT = Subject((5, 6, 7), "tenant")


def permits(secret: bytes = b"s" * 32, now: float = NOW) -> Permits:
    return Permits(secret, clock=lambda: now)


def signed(options: dict[str, Any], subject: Subject = SUBJECT, **by: Any) -> dict[str, Any]:
    return {**options, "hypic_permit": permits(**by).issue(options, subject)}


@pytest.mark.parametrize("options", [PUSH, REMOTE, {**PUSH, **REMOTE, "hypic_link": "block", "other": [1]}])
def test_what_a_router_signs_is_taken(options: dict[str, Any]) -> None:
    permits().check(signed(options), SUBJECT)
    # Others' arguments, the order of options, and sequences that are no lists are not the router's business.
    again = {"another": 5, **dict(reversed(signed(options).items()))}
    permits().check({k: tuple(v) if k == "hypic_remote" else v for k, v in again.items()}, SUBJECT)
    link_of_request(signed(options), LinkDefaults("hypic", 8))


def test_requests_without_transfer_options_need_none() -> None:
    for options in ({}, {"hypic_link": "block"}, {"hypic_push_to": None}, {"hypic_permit": "x"}):
        permits().check(options, SUBJECT)


@pytest.mark.parametrize(
    "options", [PUSH, REMOTE, {"hypic_push_deadline_s": 1}, {"hypic_remote_deadline_s": 1}]
)
def test_without_a_permit_each_option_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(LinkError, match=rf"^{next(iter(options))}: only a router may send this"):
        permits().check(options, SUBJECT)


@pytest.mark.parametrize("permit", ["", "x", 7, f"-{'0' * 64}", f"1-{'0' * 63}", f"1-{'G' * 64}", "9" * 5000])
def test_what_has_not_its_form_is_refused(permit: Any) -> None:
    with pytest.raises(LinkError, match=r"hypic_permit=.*expected UNIX_TIME-HMAC") as refusal:
        permits().check({**PUSH, "hypic_permit": permit}, SUBJECT)
    assert len(str(refusal.value)) < 300


def test_forged_permits_are_refused() -> None:
    until, mac = signed(PUSH)["hypic_permit"].split("-")
    longer = f"{int(until) + 1}-{mac}"
    for forged in (longer, f"{until}-{'0' * 64}", signed(PUSH, secret=b"t" * 32)["hypic_permit"]):
        with pytest.raises(LinkError, match="not valid for this request"):
            permits().check({**PUSH, "hypic_permit": forged}, SUBJECT)


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (PUSH, Subject((5, 6, 8), "tenant")),
        (PUSH, Subject((56, 7), "tenant")),
        (PUSH, Subject((5, 6, 7), "another")),
        (PUSH, Subject((5, 6, 7), None)),
        (PUSH, Subject((5, 6, 7), "tenant", "adapter")),
        ({**PUSH, "hypic_push_to": "tcp://10.0.0.9:22"}, SUBJECT),
        ({**PUSH, "hypic_push_deadline_s": 51.0}, SUBJECT),
        ({**PUSH, "hypic_link": "block"}, SUBJECT),
        ({**PUSH, **REMOTE}, SUBJECT),
        (REMOTE, Subject((5, 6, 7), "another")),
        ({**REMOTE, "hypic_remote": [KEY, KEY]}, SUBJECT),
        ({**REMOTE, "hypic_push_to": "tcp://10.0.0.9:22"}, SUBJECT),
    ],
)
def test_a_permit_cannot_be_moved(options: dict[str, Any], subject: Subject) -> None:
    permit = signed(PUSH if options.get("hypic_push_to") and "hypic_remote" not in options else REMOTE)
    permits().check(permit, SUBJECT)
    with pytest.raises(LinkError, match="not valid for this request"):
        permits().check({**options, "hypic_permit": permit["hypic_permit"]}, subject)


def test_awaited_records_are_named_by_what_they_hold_so_their_prompt_is_not_signed() -> None:
    """A chat template may make other ids of the same words at the engine."""
    permits().check(signed(REMOTE), Subject((9,), "tenant"))


@pytest.mark.parametrize(
    ("later_s", "fine"), [(-70, False), (-50, True), (59, True), (61, False), (4e9, False)]
)
def test_a_permit_ends(later_s: float, fine: bool) -> None:
    """Also where the engine's clock is behind by more than a permit lasts."""
    assert LIFETIME_S == 60
    late = pytest.raises(LinkError, match=r"from now: expected 0 to 120; .*clocks")
    with nullcontext() if fine else late:
        permits(now=NOW + later_s).check(signed(PUSH), SUBJECT)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "vllm-hypic" / "segment-parallel-secret"


def test_without_a_file_a_users_processes_share_one_that_the_first_makes(state: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        [secret] = set(threads.map(secret_of, [None] * 32))
    assert len(secret) == 64 and state.stat().st_mode & 0o777 == 0o600
    assert list(state.parent.iterdir()) == [state]
    assert secret_of(None) == secret_of(str(state)) == secret


def test_one_that_others_can_read_or_that_cannot_be_made_is_named(state: Path) -> None:
    secret_of(None)
    state.chmod(0o640)
    with pytest.raises(ConfigError, match=r"secret belongs to user .*, mode 640: expected .*mode 600"):
        secret_of(None)
    state.unlink()
    state.parent.rmdir()
    state.parent.write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*set secret_file"):
        secret_of(None)


def test_another_users_secret_is_refused(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_of(None)
    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        secret_of(None)
