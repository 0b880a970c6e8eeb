"""Who has the secret is let in, and nobody else: both ways, over real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from vllm_hypic.errors import ConfigError
from vllm_hypic.segment_parallel.notifier import withdraw
from vllm_hypic.segment_parallel.secret import Secret, _verdict

from .peers import ANY_PORT, Outgoing, Owner, bytes_of, name_of

RIGHT, WRONG = Secret(b"right" * 8), Secret(b"wrong" * 8)


def test_a_file_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("k" * 32 + "\n")
    other.write_text(" \n" + "k" * 32)
    secrets = [Secret.read(str(path)) for path in (one, other)]
    assert Secret.read(None) is None
    assert all(secret is not None for secret in secrets)
    with Owner(secret=secrets[0]) as owner, Outgoing(secret=secrets[1]) as outgoing:
        owner.expect(name_of(0))
        assert outgoing.deliver(name_of(0), b"x" * 100, owner.url).delivered


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
    name, data = name_of(1), bytes_of(name_of(1), 100_000)
    with Owner(secret=server) as owner, Outgoing(secret=client) as outgoing:
        owner.expect(name)
        sent = outgoing.deliver(name, data, owner.url, deadline_s=0.8)
        assert not sent.delivered
        assert sent.reason.startswith(
            "no answer (no receiver listens there, or its secret differs) within 0.8 s"
        )
        with pytest.raises(TimeoutError):
            withdraw(owner.url, "ns", [name], client, timeout_s=0.4)
        assert not owner.poll() and not owner.read
        with Outgoing(secret=server) as one_of_us:  # it was not the receiver that was out of order
            assert one_of_us.deliver(name, data, owner.url).delivered
        assert owner.wait_for(name)[0].taken


def _server(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    socket = context.socket(zmq.ROUTER)
    RIGHT.serve(socket)
    socket.bind(ANY_PORT)
    return socket


def _client(
    server: zmq.Socket[Any], key_pair: tuple[bytes, bytes] | None = None, says: bytes = b"hello"
) -> zmq.Socket[Any]:
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
