"""StoreConfig: every option of the store, typed, frozen, validated once."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, get_args

from ..errors import ConfigError

Eviction = Literal["flop-aware", "lru"]
Admission = Literal["cache-value", "always"]

_UNITS = {
    unit + suffix: factor
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for suffix, factor in (("b", 1000**power), ("ib", 1024**power), ("", 1000**power))
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.IGNORECASE)
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL_FORM = "1 to 64 letters, digits, dots, dashes or underscores"


@dataclass(frozen=True)
class TierConfig:
    """What all tiers have.  ``name`` labels the tier's metrics; the default is its type."""

    type: ClassVar[str]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.type)


@dataclass(frozen=True)
class MemoryConfig(TierConfig):
    """Host memory of the engine's worker."""

    type: ClassVar[str] = "memory"
    bytes: int = field(kw_only=True)


@dataclass(frozen=True)
class DiskConfig(TierConfig):
    """A directory of our own files."""

    type: ClassVar[str] = "disk"
    path: str = field(kw_only=True)
    bytes: int = field(kw_only=True)
    durable: bool = field(default=True, kw_only=True)
    """Survive a power cut, not only a killed process."""
    shared: bool | str = field(default=False, kw_only=True)
    """See :attr:`RedisConfig.shared`.  Also what other engines write there from now on is found: every
    look-up then reads from the file system.  Without, what the folder held at the start and what this engine
    wrote is found."""


@dataclass(frozen=True)
class RedisConfig(TierConfig):
    """A Redis server."""

    type: ClassVar[str] = "redis"
    url: str = field(kw_only=True)
    ttl_s: float | None = field(default=None, kw_only=True)
    """Seconds until the server drops an object that was given no expiry."""
    shared: bool | str = field(default=False, kw_only=True)
    """Records of segment parallelism may go from one engine to another through this tier.  Both must call it
    the same: by its address (true), or by the name given here."""


@dataclass(frozen=True)
class LMCacheConfig(TierConfig):
    """LMCache inside the worker's process: its own memory, and adapters below it."""

    type: ClassVar[str] = "lmcache"
    l1_bytes: int = field(kw_only=True)
    l2: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """LMCache's own options of each adapter, as they are."""


@dataclass(frozen=True)
class LMCacheServerConfig(TierConfig):
    """An LMCache server."""

    type: ClassVar[str] = "lmcache"
    url: str = field(kw_only=True)
    """``tcp://host:port``"""
    shared: bool | str = field(default=False, kw_only=True)
    """See :attr:`RedisConfig.shared`."""


_TYPES: dict[str, tuple[type[TierConfig], ...]] = {
    "memory": (MemoryConfig,),
    "disk": (DiskConfig,),
    "redis": (RedisConfig,),
    "lmcache": (LMCacheConfig, LMCacheServerConfig),
}


@dataclass(frozen=True)
class StoreConfig:
    """Options of the store: the section ``store`` of :class:`~vllm_hypic.config.engine.HypicConfig`.

    Sizes may be strings with a unit: ``"20GB"`` (10^9), ``"512MiB"`` (2^20).
    """

    tiers: tuple[TierConfig, ...] = ()
    """Fastest first.  None: records live in the pool alone."""
    eviction: Eviction = "flop-aware"
    """What leaves a full tier first."""
    admission: Admission = "cache-value"
    """``cache-value``: a record that is worth less than what would have to leave is not kept.  ``worth``, its
    former name, is still understood."""
    deadline_s: float = 5.0
    """A fetch ends within so many seconds; then the segment is computed."""
    queue_bytes: int = 512 << 20
    """Records on their way to the tiers.  When they are more, new ones are not stored."""
    ttl_s: float | None = None
    """Records expire so many seconds after they were written; ``None``: never."""

    def __post_init__(self) -> None:
        for i, tier in enumerate(self.tiers):
            if not isinstance(tier, TierConfig):
                _refuse(f"tiers[{i}]", tier, "a TierConfig")
            _tier(f"tiers[{i}]", _plain_tier(tier))
        names = [tier.name for tier in self.tiers]
        for i, name in enumerate(names):
            if name in names[:i]:
                _refuse(f"tiers[{i}].name", name, "a name that no other tier has (set name)")
            if name in ("queue", "pool") or not _LABEL.fullmatch(name):
                _refuse(f"tiers[{i}].name", name, f"{_LABEL_FORM}, but 'queue' and 'pool'")
        _one_of("eviction", self.eviction, get_args(Eviction))
        admission: str = self.admission
        if admission == "worth":
            object.__setattr__(self, "admission", "cache-value")
        _one_of("admission", self.admission, get_args(Admission))
        _seconds("deadline_s", self.deadline_s)
        _size("queue_bytes", self.queue_bytes)
        if self.ttl_s is not None:
            _seconds("ttl_s", self.ttl_s)

    @staticmethod
    def from_mapping(options: Mapping[str, Any]) -> StoreConfig:
        """Build from plain JSON-like options; :class:`ConfigError` names the first that is not allowed."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"hypic config: store={options!r}: expected an object")
        _known("store", options, [f.name for f in dataclasses.fields(StoreConfig)])
        values = dict(options)
        tiers = values.get("tiers", ())
        if isinstance(tiers, (str, Mapping)) or not isinstance(tiers, Sequence):
            _refuse("tiers", tiers, "a list of objects, fastest tier first")
        values["tiers"] = tuple(
            tier if isinstance(tier, TierConfig) else _tier(f"tiers[{i}]", tier)
            for i, tier in enumerate(tiers)
        )
        if "queue_bytes" in values:
            values["queue_bytes"] = _size("queue_bytes", values["queue_bytes"])
        return StoreConfig(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-like options: the inverse of :meth:`from_mapping`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**plain, "tiers": [_plain_tier(tier) for tier in self.tiers]}


def _plain_tier(tier: TierConfig) -> dict[str, Any]:
    plain = {"type": tier.type, **dataclasses.asdict(tier)}
    if isinstance(tier, LMCacheConfig):
        plain["l2"] = [dict(adapter) for adapter in tier.l2]
    return plain


def _tier(where: str, options: object) -> TierConfig:
    if not isinstance(options, Mapping):
        _refuse(where, options, 'an object like {"type": "memory", "bytes": "20GB"}')
    values = dict(options)
    kind = values.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        _refuse(f"{where}.type", kind, f"one of {', '.join(_TYPES)}")
    embedded, *others = _TYPES[kind]
    made = others[0] if others and "url" in values else embedded
    fields = dataclasses.fields(made)
    if "shared" in values and not any(f.name == "shared" for f in fields):
        able = "a tier that other engines can reach (disk, redis, or lmcache with url)"
        _refuse(f"{where}.shared", values["shared"], able)
    _known(f"store.{where}", values, [f.name for f in fields])
    for f in fields:
        if f.name not in values:
            if f.default is dataclasses.MISSING:
                raise ConfigError(
                    f"hypic config: store.{where}.{f.name} is missing: the {kind} tier needs it"
                )
            continue
        path, value = f"{where}.{f.name}", values[f.name]
        if f.name in ("bytes", "l1_bytes"):
            values[f.name] = _size(path, value)
        elif f.name == "durable":
            if not isinstance(value, bool):
                _refuse(path, value, "true or false")
        elif f.name == "shared":
            if not isinstance(value, bool) and not (isinstance(value, str) and _LABEL.fullmatch(value)):
                _refuse(path, value, f"true, false, or what all engines call the tier: {_LABEL_FORM}")
        elif f.name == "ttl_s":
            if value is not None:
                _seconds(path, value)
        elif f.name == "l2":
            values[f.name] = _adapters(path, value)
        else:
            _text(path, value)
    return made(**values)


def _adapters(path: str, value: object) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(adapter, Mapping) for adapter in value):
        return tuple(value)
    _refuse(path, value, "a list of objects, LMCache's options of each adapter")


def _size(path: str, value: object) -> int:
    """Bytes of an integer or of a string with a unit."""
    nbytes = value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        factor = _UNITS.get(match[2].lower())
        if factor is None:
            _refuse(path, value, 'a size like 1000000, "20GB" or "512MiB"')
        nbytes = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        _refuse(path, value, 'an integer >= 1, or a size like "20GB" or "512MiB"')
    return nbytes


def _seconds(path: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        _refuse(path, value, "a number of seconds > 0")


def _text(path: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        _refuse(path, value, "a non-empty string")


def _one_of(path: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(path, value, f"one of {', '.join(allowed)}")


def _known(where: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known), key=str):
        raise ConfigError(
            f"hypic config: {where}: unknown option {unknown[0]!r}; "
            f"expected one of {', '.join(sorted(known))}"
        )


def _refuse(path: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"hypic config: store.{path}={value!r}: expected {expected}")
