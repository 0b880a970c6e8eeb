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

            side.directory.watch()
            self._publisher = Publisher(parallel.events, Secret.read(parallel.secret_file))

    def describe(self) -> Description | None:
        """Return what a router needs to plan as this engine does; ``None`` without segment parallelism."""
        config, planner = self._side.config, self._side.planner
        parallel = config.segment_parallel
        if parallel is None:
            return None
        ids, traits = planner.ids, planner.traits
        return Description(
            instance=self._id,
            models=self._models,
            namespace=self._side.namespace.digest,
            generation=self._side.namespace.generation,
            receiver=parallel.receiver_url,
            events=parallel.events_url,
            ranks=self._side.ranks,
            separator=ids.sep,
            pdep=ids.pdep,
            pad=ids.pad,
            link=config.link,
            seam_tokens=config.seam_tokens,
            context=config.context,
            islands=config.islands,
            context_tokens=planner.tokens_behind(config.context),
            learned="" if planner.learned is None else planner.learned.digest,
            min_segment_tokens=config.min_segment_tokens,
            checkpoint_tokens=config.checkpoint_tokens,
            reads_successors=planner.reads_successors,
            max_model_len=self._max_model_len,
            has_linear=traits.has_linear,
            has_attention=traits.has_attention,
            has_transition=traits.has_transition,
            limits=planner.limits(),
            deadline_s=parallel.deadline_s,
            quadratic=planner.quadratic,
            shared_tiers=planner.shared_tiers,
            literal_text=config.token_texts.literal,
        )

    def publish(self, unprefilled_tokens: int) -> None:
        """Publish the changes of records since the last call, and the prompt tokens still to be computed."""
        if self._publisher is None:
            return
        if (generation := self._side.namespace.generation) != self._generation:
            # Routers plan by the description, and fetch a new description when the process seems restarted.
            self._generation = generation
            self._publisher.restart()
        by_state: dict[Lookup, list[str]] = {state: [] for state in Lookup}
        for key, state in self._side.directory.take_changes().items():
            by_state[state].append(key)
        self._publisher.change(
            by_state[Lookup.HIT], by_state[Lookup.PENDING], by_state[Lookup.MISS], unprefilled_tokens
        )

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
