"""KV events (``--kv-events-config``): routers are told of the blocks of plain requests alone.

The tokens of a private request (a composed request's stream, a segment) begin no prompt: a router that took
them for a beginning would send prompts to an engine that has nothing of them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    KVCacheEvent,
)

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.v1.request import Request


class PlainEvents(EventPublisher):
    """Passes events on to vLLM's publisher, except those of private requests' blocks."""

    def __init__(self, publisher: EventPublisher) -> None:
        super().__init__()
        self._publisher = publisher
        # Every BlockStored has its request's session: not every one has a hash or the salt.
        self._session = secrets.token_hex(16)
        self._hidden: Counter[tuple[int | None, bytes | int]] = Counter()
        """Cached blocks of private requests, by group and hash."""

    def hide(self, request: Request) -> None:
        """The request's blocks are private from now on.  It must not have been scheduled."""
        request.session_id = self._session
        # Blocks that are found again are not stored again.
        request.kv_cache_report_mode = "incremental"

    def publish(self, events: EventBatch) -> None:
        events.events = [event for event in events.events if not self._is_private(event)]
        if events.events:
            self._publisher.publish(events)

    def _is_private(self, event: KVCacheEvent) -> bool:
        match event:
            case BlockStored(session_id=self._session):
                self._hidden.update((event.group_idx, block) for block in event.block_hashes)
                return True
            case BlockRemoved():
                return self._forget(event)
            case AllBlocksCleared():
                self._hidden.clear()
        return False

    def _forget(self, event: BlockRemoved) -> bool:
        """Take note that blocks were removed; whether they were private.  All of an event's are, or none."""
        blocks = [(event.group_idx, block) for block in event.block_hashes]
        if not any(block in self._hidden for block in blocks):
            return False
        for block in blocks:
            self._hidden[block] -= 1
            if not self._hidden[block]:
                del self._hidden[block]
        return True

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        return self._publisher.get_publisher_config()
