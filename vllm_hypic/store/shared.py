"""Tiers that several engines share, and the identities by which engines recognise each other's tiers."""

from __future__ import annotations

import hashlib
import json
import os
from urllib.parse import parse_qs

from ..config.store import DiskConfig, LMCacheServerConfig, RedisConfig, StoreConfig, TierConfig

IDENTITY_DIGITS = 16
"""Hexadecimal digits of an identity."""


def shared_tiers(config: StoreConfig) -> dict[str, str]:
    """Return the names of the tiers with the option ``shared``, by identity, the fastest tier first."""
    found: dict[str, str] = {}
    for tier in config.tiers:
        if (identity := identity_of(tier)) is not None:
            found.setdefault(identity, tier.name)
    return found


def identity_of(tier: TierConfig) -> str | None:
    """Return the identity that a shared tier has in all engines, or ``None`` for a tier that is not shared.

    The identity is a digest of the tier's type and of the name in ``shared`` (true: the configured address
    without user and password).  All engines must therefore write name or address alike.
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
    """Return the address of the tier without secrets."""
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
