"""StoreConfig: every option of the store, typed, frozen, validated once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StrictBool, StrictStr

from .schema import (
    Allowed,
    ConfigSection,
    PathText,
    Seconds,
    Text,
    adapter,
    checked,
    expected,
    options,
    plain,
    refuse,
)

_UNITS = {
    unit + suffix: factor
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for suffix, factor in (("b", 1000**power), ("ib", 1024**power), ("", 1000**power))
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.IGNORECASE)
_LABEL = r"^[A-Za-z0-9._-]{1,64}$"
_LABEL_FORM = "1 to 64 letters, digits, dots, dashes or underscores"


def _bytes(size: object) -> int:
    """Bytes of an integer or of a string with a unit."""
    nbytes = size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        factor = _UNITS.get(match[2].lower())
        if factor is None:
            raise expected('a size like 1000000, "20GB" or "512MiB"')
        nbytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise expected('an integer >= 1, or a size like "20GB" or "512MiB"')
    return nbytes


def _without_password(url: str) -> str:
    """Options are on command lines and in logs, which a password should not be."""
    if re.search(r"://[^@]*:.*@|[?&]password=", url):
        raise expected("no password in it: give it by password_file or password_env")
    return url


Size = Annotated[int, PlainValidator(_bytes)]
Shared = Annotated[
    StrictBool | Annotated[StrictStr, Field(pattern=_LABEL)],
    Allowed(f"true, false, or what all engines call the tier: {_LABEL_FORM}"),
]
Adapters = Annotated[
    tuple[Mapping[str, Any], ...], Allowed("a list of objects, LMCache's options of each adapter")
]


@dataclass(frozen=True)
class TierConfig:
    """Options that all tiers have.  ``name`` labels the tier's metrics; the default is its type."""

    type: ClassVar[str]
    name: Text = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.type)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(TierConfig):
    """Host memory of the engine's worker."""

    type: ClassVar[str] = "memory"
    bytes: Size


@dataclass(frozen=True, kw_only=True)
class DiskConfig(TierConfig):
    """A directory of our own files."""

    type: ClassVar[str] = "disk"
    path: Text
    bytes: Size
    durable: Annotated[StrictBool, Allowed("true or false")] = True
    """Survive a power cut, not only a killed process."""
    shared: Shared = False
    """See :attr:`RedisConfig.shared`.  Also what other engines write there from now on is found: every
    look-up then reads from the file system.  Without, what the folder held at the start and what this engine
    wrote is found."""


@dataclass(frozen=True, kw_only=True)
class RedisConfig(TierConfig):
    """A Redis server."""

    type: ClassVar[str] = "redis"
    url: Annotated[Text, AfterValidator(_without_password)]
    password_file: PathText | None = None
    """A file that holds the password, white space around it apart."""
    password_env: Text | None = None
    """The environment variable that holds it."""
    ttl_s: Seconds | None = None
    """Seconds until the server drops an object that was given no expiry."""
    shared: Shared = False
    """Records of segment parallelism may go from one engine to another through this tier.  Both must call it
    the same: by its address (true), or by the name given here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.password_file is not None and self.password_env is not None:
            refuse("password_env", self.password_env, "null, as password_file is given")


@dataclass(frozen=True, kw_only=True)
class LMCacheConfig(TierConfig):
    """LMCache inside the worker's process: its own memory, and adapters below it."""

    type: ClassVar[str] = "lmcache"
    l1_bytes: Size
    l2: Adapters = ()
    """LMCache's own options of each adapter, as they are."""


@dataclass(frozen=True, kw_only=True)
class LMCacheServerConfig(TierConfig):
    """An LMCache server."""

    type: ClassVar[str] = "lmcache"
    url: Text
    """``tcp://host:port``"""
    shared: Shared = False
    """See :attr:`RedisConfig.shared`."""


_TYPES: dict[str, tuple[type[TierConfig], ...]] = {
    "memory": (MemoryConfig,),
    "disk": (DiskConfig,),
    "redis": (RedisConfig,),
    "lmcache": (LMCacheConfig, LMCacheServerConfig),
}


def _tier(given: object) -> TierConfig:
    if not isinstance(given, TierConfig | Mapping):
        raise expected('an object like {"type": "memory", "bytes": "20GB"}')
    values = dict(plain(given))
    kind = values.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        refuse("type", kind, f"one of {', '.join(_TYPES)}")
    made = _TYPES[kind][-1 if "url" in values else 0]
    if "shared" in values and "shared" not in [f.name for f in fields(made)]:
        able = "a tier that other engines can reach (disk, redis, or lmcache with url)"
        refuse("shared", values["shared"], able)
    return adapter(made).validate_python(checked(made, values, f"the {kind} tier needs it"))


def _room(tier: TierConfig) -> int:
    match tier:
        case MemoryConfig(bytes=room) | DiskConfig(bytes=room) | LMCacheConfig(l1_bytes=room):
            return room
    return 0


def _listed(tiers: object) -> tuple[object, ...]:
    if isinstance(tiers, str) or not isinstance(tiers, Sequence):
        raise expected("a list of objects, fastest tier first")
    return tuple(tiers)


@options
class StoreConfig(ConfigSection):
    """Options of the store: the section ``store`` of :class:`~vllm_hypic.config.engine.HypicConfig`.

    Sizes may be strings with a unit: ``"20GB"`` (10^9), ``"512MiB"`` (2^20).
    """

    section = "store"

    tiers: Annotated[tuple[Annotated[TierConfig, PlainValidator(_tier)], ...], BeforeValidator(_listed)] = ()
    """Fastest first.  None: records live in the pool alone."""
    eviction: Annotated[Literal["flop-aware", "lru"], Allowed()] = "flop-aware"
    """What leaves a full tier first."""
    admission: Annotated[
        Literal["cache-value", "always"],
        Allowed(),
        BeforeValidator(lambda given: "cache-value" if given == "worth" else given),
    ] = "cache-value"
    """``cache-value``: a record of less value than what would have to leave is not kept.  ``worth``, its
    former name, is still understood."""
    deadline_s: Seconds = 5.0
    """A fetch ends within so many seconds; then the segment is computed."""
    queue_bytes: Size = 512 << 20
    """Records on their way to the tiers.  When they are more, new ones are not stored."""
    ttl_s: Seconds | None = None
    """Records expire so many seconds after they were written; ``None``: never."""
    close_s: Seconds = 5.0
    """When the engine ends, what is queued is written for so many seconds."""

    @property
    def tier_bytes(self) -> int:
        """What the largest tier holds, of those whose size is known here."""
        return max(map(_room, self.tiers), default=0)

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        for i, name in enumerate(names):
            if name in names[:i]:
                refuse(("tiers", i, "name"), name, "a name that no other tier has (set name)")
            if name in ("queue", "pool") or not re.fullmatch(_LABEL, name):
                refuse(("tiers", i, "name"), name, f"{_LABEL_FORM}, but 'queue' and 'pool'")
