"""The Redis server that all servers share: workers and combine nodes are users that tests can lock out."""

from __future__ import annotations

from typing import Any

from benchmarks.services import RedisServer

WORKER, COMBINE = "worker", "combine"


def store_of(server: RedisServer, user: str) -> dict[str, Any]:
    """Options of the plugin."""
    url = server.url.replace("://", f"://{user}@")
    return {"store": {"tiers": [{"type": "redis", "url": url, "shared": True}]}}


def allow(server: RedisServer, user: str, commands: str = "+@all") -> None:
    """Let the user do this; ``-@all``: nothing any more."""
    with server.client() as client:
        client.acl_setuser(user, enabled=True, nopass=True, keys=["*"], commands=[commands])
