"""``GET /healthcheck``: what the router knows, as JSON."""

from __future__ import annotations

from typing import Any

from .flights import Flights
from .instances import Instance, Pool, State


def health(pool: Pool, flights: Flights) -> tuple[int, dict[str, Any]]:
    """Status and body; 503 when no instance can answer clients."""
    well = any(i.answers for i in pool.combiners())
    return 200 if well else 503, {
        "status": "ok" if well else "no combine instance is usable",
        "namespace": pool.namespace,
        "flights": len(flights),
        "instances": [_instance(i) for i in pool.instances],
    }


def _unheard(instance: Instance) -> str:
    if instance.state is not State.DESCRIBED or instance.view.known:
        return ""
    return "its events are not heard: not reachable, another secret_file, or its engine hangs"


def _instance(instance: Instance) -> dict[str, Any]:
    view = instance.view
    return {
        "url": instance.url,
        "prefill": instance.roles.prefill,
        "combine": instance.roles.combine,
        "state": instance.state.value,
        "reason": instance.reason or _unheard(instance),
        "up": instance.up,
        "answers": instance.answers,
        "suspect": instance.suspect,
        "events_known": view.known,
        "load_tokens": instance.load,
        "resident": len(view.resident),
        "pending": len(view.pending),
        "open_requests": instance.open_requests,
        "models": list(instance.description.models) if instance.description is not None else [],
        "boot": view.boot,
    }
