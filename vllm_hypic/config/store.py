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
    Form,
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
        raise expected("a URL without a password: give the password by password_file or password_env")
    return url


Size = Annotated[int, PlainValidator(_bytes), Form('an integer >= 1, or a size like "20GB" or "512MiB"')]
Shared = Annotated[
    StrictBool | Annotated[StrictStr, Field(pattern=_LABEL)],
    Allowed(f"true, false, or the name that all engines give the tier: {_LABEL_FORM}"),
]
Adapters = Annotated[
    tuple[Mapping[str, Any], ...], Allowed("a list of objects, LMCache's options of each adapter")
]


@dataclass(frozen=True)
class TierConfig:
    """Options that all tiers have.  ``name`` labels the tier's metrics; the default is its type."""

    type: ClassVar[str]
    name: Annotated[Text, Form(f"{_LABEL_FORM}; not queue or pool")] = ""
    """Label of the tier's metrics; the default is the tier's type. Two tiers of one type need different
    names."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.type)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(TierConfig):
    """Host memory of the engine's worker."""

    type: ClassVar[str] = "memory"
    bytes: Size
    """Budget of the tier in each worker."""


@dataclass(frozen=True, kw_only=True)
class DiskConfig(TierConfig):
    """A directory of our own files."""

    type: ClassVar[str] = "disk"
    path: Text
    """Folder of the tier, made if it is missing. Other files in the folder stay as they are."""
    bytes: Size
    """Budget of the tier in each worker: bytes of records, without the file system's blocks."""
    durable: Annotated[StrictBool, Allowed("true or false")] = True
    """Records survive a power cut (``fsync``). With false records survive a killed process only."""
    shared: Shared = False
    """Other engines use the folder, too, and records of segment parallelism may travel through it. Every
    look-up then reads from the file system; without this option the engine finds its own records,
    and the records that the folder held at the start."""


@dataclass(frozen=True, kw_only=True)
class RedisConfig(TierConfig):
    """A Redis server."""

    type: ClassVar[str] = "redis"
    url: Annotated[
        Text,
        AfterValidator(_without_password),
        Form("a redis://, rediss:// or unix:// URL without a password"),
    ]
    """Server, database and, where needed, user."""
    password_file: PathText | None = None
    """File with the password; white space around the password is ignored."""
    password_env: Text | None = None
    """Environment variable with the password, instead of a file."""
    ttl_s: Seconds | None = None
    """Seconds until the server drops a record that has no expiry of its own, at least 0.001."""
    shared: Shared = False
    """Records of segment parallelism may travel from engine to engine through this tier. All engines must
    name the tier alike: by its address (true), or by the name given here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.password_file is not None and self.password_env is not None:
            refuse("password_env", self.password_env, "null, as password_file is given")


@dataclass(frozen=True, kw_only=True)
class LMCacheConfig(TierConfig):
    """LMCache inside the worker's process: its own memory, and adapters below it."""

    type: ClassVar[str] = "lmcache"
    l1_bytes: Annotated[Size, Form('a size of at least "1MiB"')]
    """Memory of LMCache, allocated at the start."""
    l2: Adapters = ()
    """LMCache's own options of each adapter, such as ``fs_native`` with its ``base_path``."""


@dataclass(frozen=True, kw_only=True)
class LMCacheServerConfig(TierConfig):
    """An LMCache server."""

    type: ClassVar[str] = "lmcache"
    url: Annotated[Text, Form("tcp://HOST:PORT or grpc://HOST:PORT")]
    """Address of an LMCache server that runs the module ``vllm_hypic.store.tiers.lmcache_module``."""
    shared: Shared = False
    """Records of segment parallelism may travel from engine to engine through this tier. All engines must
    name the tier alike: by its address (true), or by the name given here."""


TIERS: dict[str, tuple[type[TierConfig], ...]] = {
    "memory": (MemoryConfig,),
    "disk": (DiskConfig,),
    "redis": (RedisConfig,),
    "lmcache": (LMCacheConfig, LMCacheServerConfig),
}
"""Options of a tier by its ``type``; of two, the last is that with a ``url``."""


def _tier(given: object) -> TierConfig:
    if not isinstance(given, TierConfig | Mapping):
        raise expected('an object like {"type": "memory", "bytes": "20GB"}')
    values = dict(plain(given))
    kind = values.pop("type", None)
    if not isinstance(kind, str) or kind not in TIERS:
        refuse("type", kind, f"one of {', '.join(TIERS)}")
    made = TIERS[kind][-1 if "url" in values else 0]
    if "shared" in values and "shared" not in [f.name for f in fields(made)]:
        able = "a tier that other engines can reach (disk, redis, or lmcache with url)"
        refuse("shared", values["shared"], able)
    return adapter(made).validate_python(checked(made, values, f"the {kind} tier needs a value"))


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

    tiers: Annotated[
        tuple[Annotated[TierConfig, PlainValidator(_tier)], ...],
        BeforeValidator(_listed),
        Form("a list of objects with different names"),
    ] = ()
    """Tiers behind the pool, fastest first; without tiers, records live in the pool alone."""
    eviction: Annotated[Literal["flop-aware", "lru"], Allowed()] = "flop-aware"
    """Policy that chooses the records that the pool, or a full ``memory`` or ``disk`` tier, evicts first."""
    admission: Annotated[Literal["cache-value", "always"], Allowed()] = "cache-value"
    """With ``cache-value``, a new record stays only if the record's FLOPs, divided by its age, are at least
    the sum of these quotients of the records to evict. ``always`` and eviction ``lru`` keep every record."""
    deadline_s: Seconds = 5.0
    """Longest time in which all tiers together fetch a record; after this time the segment is computed."""
    queue_bytes: Size = 512 << 20
    """Memory for records on their way to the tiers. While the queue is full, new records are not stored. A
    larger record waits until the queue is empty."""
    ttl_s: Seconds | None = None
    """Seconds after which a written record expires; with ``null`` records never expire."""
    close_s: Seconds = 5.0
    """Longest time in which the engine writes the queue when it ends."""

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
                refuse(("tiers", i, "name"), name, f"{_LABEL_FORM}, but not 'queue' or 'pool'")
