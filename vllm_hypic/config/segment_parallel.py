"""ParallelConfig: the options of segment parallelism, typed, frozen, validated once."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import ConfigError

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

    @property
    def ipv6(self) -> bool:
        return ":" in self.host

    @property
    def numeric(self) -> bool:
        return self._ip is not None

    @property
    def loopback(self) -> bool:
        """Certainly on this machine: a name, whatever it stands for, is not."""
        return self._ip is not None and self._ip.is_loopback

    @property
    def wildcard(self) -> bool:
        """All interfaces: one can bind to it, and nobody can connect to it."""
        return self._ip is not None and self._ip.is_unspecified

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


@dataclass(frozen=True)
class ParallelConfig:
    """The section ``segment_parallel`` of :class:`~vllm_hypic.config.engine.HypicConfig`."""

    listen: str
    """``tcp://ADDRESS:PORT``, where records of other instances land."""
    events: str
    """``tcp://ADDRESS:PORT``, where changes of what is cached here are published."""
    advertise: str | None = None
    """What others are told instead of ``listen``: behind NAT, or bound to all interfaces."""
    advertise_events: str | None = None
    """What others are told instead of ``events``."""
    secret_file: str | None = None
    """File with a secret that all instances and routers share.  Without, only loopback is served."""
    deadline_s: float = 120.0
    """Longest that a request waits for remote segments when it names no other time, in seconds."""
    transport: str = "tcp"
    """``tcp``, or ``nixl``: records travel over NIXL between instances that both say so."""
    nixl_bytes: int = 256 << 20
    """Of each of the two buffers that NIXL reads from and into; longer records travel over TCP."""

    def __post_init__(self) -> None:
        if self.secret_file is not None and (not isinstance(self.secret_file, str) or not self.secret_file):
            _refuse("secret_file", self.secret_file, "a path, or null")
        listen = self._served("listen", self.listen, "advertise", self.advertise)
        events = self._served("events", self.events, "advertise_events", self.advertise_events)
        if listen.port == events.port and (listen.host == events.host or listen.wildcard or events.wildcard):
            _refuse("events", self.events, f"another port than that of listen={self.listen!r}")
        seconds = self.deadline_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            _refuse("deadline_s", seconds, "a number of seconds > 0")
        if self.transport not in ("tcp", "nixl"):
            _refuse("transport", self.transport, "tcp or nixl")
        nbytes = self.nixl_bytes
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 1 << 20 <= nbytes <= 1 << 40:
            _refuse("nixl_bytes", nbytes, "a number of bytes from 1048576 to 1099511627776")

    def _served(self, field: str, bound: object, told_field: str, told: object) -> Address:
        """The address bound, once it and what others are told of it are found to be in order."""
        address = _address(field, bound)
        if not address.numeric:
            _refuse(field, bound, "an IP address of this machine (or localhost), not a name")
        if not address.loopback and self.secret_file is None:
            _refuse(field, bound, "a loopback address such as tcp://127.0.0.1:7100, or set secret_file")
        if told is not None:
            if _address(told_field, told).wildcard:
                _refuse(told_field, told, "an address that others can connect to")
        elif address.wildcard:
            _refuse(field, bound, f"one interface's address, or set {told_field} to what others connect to")
        return address

    @property
    def landing_url(self) -> str:
        """What others are told of ``listen``."""
        return self.advertise if self.advertise is not None else self.listen

    @property
    def events_url(self) -> str:
        """What others are told of ``events``."""
        return self.advertise_events if self.advertise_events is not None else self.events

    @staticmethod
    def from_mapping(options: Mapping[str, Any]) -> ParallelConfig:
        """Build from plain JSON-like options; :class:`ConfigError` names the first that is not allowed."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"hypic config: segment_parallel={options!r}: expected an object")
        fields = {f.name: f for f in dataclasses.fields(ParallelConfig)}
        if unknown := sorted(set(options) - set(fields), key=str):
            raise ConfigError(
                f"hypic config: segment_parallel: unknown option {unknown[0]!r}; "
                f"expected one of {', '.join(sorted(fields))}"
            )
        for name in fields:
            if fields[name].default is dataclasses.MISSING and name not in options:
                raise ConfigError(
                    f"hypic config: segment_parallel.{name} is missing: expected tcp://ADDRESS:PORT"
                )
        return ParallelConfig(**options)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-like options: the inverse of :meth:`from_mapping`."""
        return dataclasses.asdict(self)


def _address(field: str, value: object) -> Address:
    try:
        return Address.parse(value)  # type: ignore[arg-type]
    except ValueError as e:
        raise ConfigError(f"hypic config: segment_parallel.{field}={e}") from e


def _refuse(field: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"hypic config: segment_parallel.{field}={value!r}: expected {expected}")
