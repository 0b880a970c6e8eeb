"""KV events (``--kv-events-config``): routers hear only of the blocks of plain requests.

The tokens of a private request (a composed request's stream, a segment) begin no prompt.  A router that
took these tokens for a prefix would send prompts to an engine without any block of the prompts.
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
    """Passes events on to vLLM's publisher, except events of private requests' blocks."""

    def __init__(self, publisher: EventPublisher) -> None:
        super().__init__()
        self._publisher = publisher
        # The session id marks private blocks: every BlockStored has it, but not every one a hash or salt.
        self._session = secrets.token_hex(16)
        self._hidden: Counter[tuple[int | None, bytes | int]] = Counter()
        """Cached blocks of private requests, by group and hash."""

    def hide(self, request: Request) -> None:
        """Mark the blocks of ``request`` as private from now on; the request must not have been scheduled."""
        request.session_id = self._session
        # In this mode vLLM reports only new blocks, not blocks found in its prefix cache.
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
        """Count removed blocks down; return whether the event's blocks, all or none, are private."""
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
