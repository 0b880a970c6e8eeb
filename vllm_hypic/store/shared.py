"""Tiers that several engines share, and by what one engine knows another one's tier again."""

from __future__ import annotations

import hashlib
import json
import os
from urllib.parse import parse_qs

from ..config.store import DiskConfig, LMCacheServerConfig, RedisConfig, StoreConfig, TierConfig

IDENTITY_DIGITS = 16
"""Hexadecimal digits of an identity."""


def shared_tiers(config: StoreConfig) -> dict[str, str]:
    """Names of the tiers whose option ``shared`` is set, by identity; fastest first."""
    found: dict[str, str] = {}
    for tier in config.tiers:
        if (identity := identity_of(tier)) is not None:
            found.setdefault(identity, tier.name)
    return found


def identity_of(tier: TierConfig) -> str | None:
    """The identity by which all engines that share the tier know it; ``None``: it is not shared.

    A digest of the type and of what ``shared`` says: a name, or, where that is true, the address as it is
    configured, without user and password.  It must therefore be written alike everywhere.
    """
    if not isinstance(tier, DiskConfig | RedisConfig | LMCacheServerConfig) or not tier.shared:
        return None
    where = tier.shared if isinstance(tier.shared, str) else _address(tier)
    # A Redis tier's name is part of its objects' keys.
    name = tier.name if isinstance(tier, RedisConfig) else ""
    named = isinstance(tier.shared, str)
    told = json.dumps([tier.type, name, named, where])
    return hashlib.sha256(told.encode()).hexdigest()[:IDENTITY_DIGITS]


def _address(tier: DiskConfig | RedisConfig | LMCacheServerConfig) -> str:
    """Without anything secret."""
    if isinstance(tier, DiskConfig):
        return os.path.abspath(tier.path)
    scheme, _, rest = tier.url.partition("://")
    if isinstance(tier, LMCacheServerConfig):
        return f"{scheme}://{rest.rstrip('/')}".lower()
    rest, _, query = rest.partition("?")
    server, _, path = rest.rpartition("@")[2].partition("/")
    [database] = parse_qs(query).get("db", [""])[:1]
    if scheme == "unix":
        return f"/{path} {database or 0}"
    port = "" if server.rpartition("]")[2].count(":") else ":6379"
    return f"{server.lower()}{port} {database or path.strip('/') or 0}"
