"""SegmentParallelConfig: the options of segment parallelism, typed, frozen, validated once."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StrictInt

from .schema import Allowed, ConfigSection, Form, Number, PathText, Seconds, expected, options, refuse

_URL = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})"
)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    """Where a socket is bound, or connects to: ``tcp://HOST:PORT``, IPv6 addresses in brackets.

    Names are looked up as IPv4.
    """

    host: str
    """IPv4 or IPv6 address without brackets, or a host name."""
    port: int

    @staticmethod
    def parse(url: str, any_port: bool = False) -> Address:
        """``ValueError`` says what is wrong with ``url``.  ``any_port``: port 0 is allowed."""
        match = _URL.fullmatch(url) if isinstance(url, str) else None
        if not match or not (0 if any_port else 1) <= int(match["port"]) < 65536:
            raise ValueError(f"{url!r}: expected tcp://ADDRESS:PORT, port 1 to 65535")
        if match["v6"]:
            try:
                host = str(ipaddress.IPv6Address(match["v6"]))
            except ValueError as e:
                raise ValueError(f"{url!r}: expected an IPv6 address in the brackets: {e}") from e
        else:
            host = match["host"].lower()
            if not all(_LABEL.fullmatch(label) for label in host.split(".")):
                raise ValueError(f"{url!r}: expected an IP address or a host name before the port")
        # Nobody has to look up what this name means, and libzmq binds to no names.
        return Address("127.0.0.1" if host == "localhost" else host, int(match["port"]))

    @property
    def url(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if self.ipv6 else f"tcp://{self.host}:{self.port}"

    def of_rank(self, rank: int) -> Address:
        """Where rank ``rank`` of an engine listens whose first one listens here.  ``ValueError``: nowhere."""
        if not (port := self.port + rank) < 65536:
            raise ValueError(f"{self.url!r}: expected a port of at most {65535 - rank}, for rank {rank}")
        return Address(self.host, port)

    @property
    def ipv6(self) -> bool:
        return ":" in self.host

    @property
    def numeric(self) -> bool:
        return self._ip is not None

    @property
    def loopback(self) -> bool:
        """Whether it is certainly on this machine: a name, whatever it stands for, is not."""
        return self._ip is not None and self._ip.is_loopback

    @property
    def wildcard(self) -> bool:
        """Whether it means all interfaces: one can bind to it, and nobody can connect to it."""
        return self._ip is not None and self._ip.is_unspecified

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def _parsed(url: Any) -> str:
    try:
        Address.parse(url)
    except ValueError as e:
        raise expected(str(e).removeprefix(f"{url!r}: expected ")) from e
    return str(url)


Url = Annotated[str, PlainValidator(_parsed), Form("tcp://ADDRESS:PORT, port 1 to 65535")]


@options
class SegmentParallelConfig(ConfigSection):
    """The section ``segment_parallel`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    section = "segment_parallel"
    missing = "expected tcp://ADDRESS:PORT"

    listen: Url
    """Address at which the engine receives records of other instances. With several ranks the first rank
    listens here, and the others at the ports that follow."""
    events: Url
    """Address at which the engine publishes changes of its cached records."""
    advertise: Url | None = None
    """Address of the receiver that other instances use: behind NAT, or where ``listen`` binds all interfaces.
    With ``null`` other instances use ``listen``."""
    advertise_events: Url | None = None
    """Address of the events that other instances and routers use; with ``null`` they use ``events``."""
    secret_file: PathText | None = None
    """File with the secret that all instances and routers share; required unless both addresses are loopback.
    With ``null`` the instances and routers of one user on one machine share a secret that they make
    themselves."""
    deadline_s: Seconds = 120.0
    """Longest time that a request waits for records of other instances, in seconds."""
    max_awaited_fraction: Annotated[Number, Field(ge=0, le=1), Allowed("a number from 0 to 1")] = 0.5
    """Share of the pool in which the engine awaits records of other instances; further records are computed
    here. A request that waits alone may await all its records."""
    transport: Annotated[Literal["tcp", "nixl"], Allowed("tcp or nixl")] = "tcp"
    """``tcp``, or ``nixl``: records travel over NIXL between two instances that both set ``nixl``."""
    nixl_bytes: Annotated[
        StrictInt,
        Field(ge=1 << 20, le=1 << 40),
        Allowed("a number of bytes from 1048576 to 1099511627776"),
    ] = 256 << 20
    """Size of each of the two buffers that NIXL reads and writes; a longer record travels over TCP."""

    def __post_init__(self) -> None:
        listen = self._served("listen", self.listen, "advertise", self.advertise)
        events = self._served("events", self.events, "advertise_events", self.advertise_events)
        if listen.port == events.port and (listen.host == events.host or listen.wildcard or events.wildcard):
            refuse("events", self.events, f"a port other than the port of listen={self.listen!r}")

    def _served(self, field: str, bound: str, told_field: str, told: str | None) -> Address:
        """The address bound, once it and what others are told of it are found to be in order."""
        address = Address.parse(bound)
        if not address.numeric:
            refuse(field, bound, "an IP address of this machine (or localhost), not a name")
        if not address.loopback and self.secret_file is None:
            refuse(field, bound, "a loopback address such as tcp://127.0.0.1:7100, or set secret_file")
        if told is not None:
            if Address.parse(told).wildcard:
                refuse(told_field, told, "an address that other instances can connect to")
        elif address.wildcard:
            refuse(field, bound, f"the address of one interface, or set {told_field}")
        return address

    @property
    def receiver_url(self) -> str:
        """The address that others are told for ``listen``."""
        return self.advertise if self.advertise is not None else self.listen

    @property
    def events_url(self) -> str:
        """The address that others are told for ``events``."""
        return self.advertise_events if self.advertise_events is not None else self.events
