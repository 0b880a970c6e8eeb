"""Informs routers about this engine: its description on request, and changes of its pool as they happen."""

from __future__ import annotations

import secrets

from ..connector.scheduler.connector import SchedulerConnector
from ..connector.scheduler.entries import Lookup
from ..segment_parallel.description import Description


class RoutedInstance:
    """One engine as an instance of segment parallelism; silent without section ``segment_parallel``.

    Only the scheduler's thread uses this class.
    """

    def __init__(self, side: SchedulerConnector, models: tuple[str, ...], max_model_len: int) -> None:
        """``models``: names under which the engine serves the model."""
        self._side, self._models, self._max_model_len = side, models, max_model_len
        self._id = secrets.token_hex(8)
        self._generation = side.namespace.generation
        self._publisher = None
        if (parallel := side.config.segment_parallel) is not None:
            from ..segment_parallel.events import Publisher
            from ..segment_parallel.secret import Secret

            side.watch_records()
            self._publisher = Publisher(parallel.events, Secret.read(parallel.secret_file))

    def describe(self) -> Description | None:
        """Return what a router needs to plan as this engine does; ``None`` without segment parallelism."""
        return self._side.describe(self._id, self._models, self._max_model_len)

    def publish(self, unprefilled_tokens: int) -> None:
        """Publish the changes of records since the last call, and the prompt tokens still to be computed."""
        if self._publisher is None:
            return
        if (generation := self._side.namespace.generation) != self._generation:
            # Routers plan by the description, and fetch a new description when the process seems restarted.
            self._generation = generation
            self._publisher.restart()
        by_state: dict[Lookup, list[str]] = {state: [] for state in Lookup}
        for key, state in self._side.take_changes().items():
            by_state[state].append(key)
        self._publisher.change(
            by_state[Lookup.HIT], by_state[Lookup.PENDING], by_state[Lookup.MISS], unprefilled_tokens
        )

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
