"""Build a running store from options.  Only the modules of configured tiers are imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..config.store import (
    DiskConfig,
    LMCacheConfig,
    LMCacheServerConfig,
    MemoryConfig,
    RedisConfig,
    StoreConfig,
    TierConfig,
)
from ..errors import ConfigError
from .eviction.policy import make_policy
from .protocol import CacheValue, ObjectName
from .record import PEEK_BYTES, Fault, peek_value
from .settings import StoreSettings
from .tiered import TieredStore
from .tiers.base import Tier


def build_store(config: StoreConfig, namespace: str, rank: int = 0, world: int = 1) -> TieredStore | None:
    """Return the open store of the worker ``rank`` of ``world``, or ``None`` if ``config`` has no tiers.

    The call waits at most :attr:`StoreSettings.open_s` seconds for tiers to open.  ``namespace`` separates
    the objects of different models and layouts in shared tiers.  Raises :class:`ConfigError` with the index
    of a tier that cannot be made.
    """
    if not config.tiers:
        return None
    settings = StoreSettings(
        deadline_s=config.deadline_s,
        queue_bytes=config.queue_bytes,
        ttl_s=config.ttl_s,
        close_s=config.close_s,
    )

    def adopts(name: ObjectName) -> bool:
        """Whether no other rank of this engine wrote the object: each rank has a budget of its own."""
        return not name.endswith(f"-{world}") or name.endswith(f".{rank}-{world}")

    tiers = [_build(i, tier, config, namespace, adopts) for i, tier in enumerate(config.tiers)]
    store = TieredStore(tiers, settings, appraise=_value_of_record)
    store.open()
    return store


def _build(
    i: int, tier: TierConfig, config: StoreConfig, namespace: str, adopts: Callable[[ObjectName], bool]
) -> Tier:
    try:
        return _make(tier, config, namespace, adopts)
    except ImportError as e:
        raise ConfigError(
            f"hypic config: store.tiers[{i}]: a package of the {tier.type} tier is missing: {e}"
        ) from e
    except ValueError as e:
        raise ConfigError(f"hypic config: store.tiers[{i}]: {e}") from e


def _make(
    tier: TierConfig, config: StoreConfig, namespace: str, adopts: Callable[[ObjectName], bool]
) -> Tier:
    match tier:
        case MemoryConfig():
            from .tiers.memory import MemoryTier

            return MemoryTier(tier.name, tier.bytes, make_policy(config.eviction, config.admission))
        case DiskConfig():
            from .tiers.disk import DiskTier

            policy = make_policy(config.eviction, config.admission)
            return DiskTier(
                tier.name,
                Path(tier.path),
                tier.bytes,
                policy,
                durable=tier.durable,
                shared=bool(tier.shared),
                namespace=namespace,
                ttl_s=config.ttl_s,
                adopts=adopts,
            )
        case RedisConfig():
            from .tiers.redis import RedisTier

            return RedisTier(tier.name, tier.url, tier.ttl_s, namespace, password=password_of(tier))
        case LMCacheConfig():
            from .tiers.lmcache import LMCacheTier

            return LMCacheTier(tier.name, tier.l1_bytes, [dict(adapter) for adapter in tier.l2], namespace)
        case LMCacheServerConfig():
            from .tiers.lmcache_server import LMCacheServerTier

            return LMCacheServerTier(tier.name, tier.url, namespace)
    raise TypeError(f"{type(tier).__name__}: expected the configuration of a tier")


def _value_of_record(data: memoryview) -> CacheValue | None:
    peeked = peek_value(bytes(data[:PEEK_BYTES]))
    return None if isinstance(peeked, Fault) else peeked[2]


def password_of(tier: RedisConfig) -> str | None:
    """Return the tier's password, or ``None`` if the tier has none.

    The password comes from a file or the environment, where neither ``ps`` nor logs show it.  Raises
    ``ValueError`` with the name of a file or variable without a password; no message shows the content of
    either."""
    if tier.password_file is not None:
        where = f"password_file={tier.password_file!r}"
        try:
            found = Path(tier.password_file).read_text().strip()
        except OSError as e:
            raise ValueError(f"{where}: cannot be read: {e.strerror}") from e
        except UnicodeDecodeError:
            raise ValueError(f"{where}: expected text in UTF-8") from None
    elif tier.password_env is not None:
        where = f"password_env={tier.password_env!r}"
        found = os.environ.get(tier.password_env, "")
    else:
        return None
    if not found:
        raise ValueError(f"{where}: expected a password, found nothing")
    return found
