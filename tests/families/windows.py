"""What is to be shown of windows, and of layers that share K and V, alone."""

from __future__ import annotations

from typing import Any

from engine.engines import Ask, worker_of
from engine.test_contexts_and_islands import CONTEXT, ISLANDS, islands_of
from engine.test_oracle_agreement import KL_FACTOR, distance

from .contract import Served, first_token


def islands_behind_a_text(served: Served) -> None:
    """Records with a context, and recomputed windows inside them."""
    extra = {"hypic_context": "text", "hypic_islands": ISLANDS}
    ours, theirs = [], []
    for text in (text.asking() for text in served.texts):
        islands = served.engine.call(islands_of, text.tokens, extra)
        assert any(islands.values())
        ours.append(first_token(served.engine, Ask(text.tokens, extra=extra)))
        given = (text.lead, text.segments, text.query)
        theirs.append(served.oracle.next_token_logprobs(*given, context=CONTEXT, islands=islands))
    assert served.weighed(distance(ours, theirs)) <= served.bound


def a_window_is_what_stock_says(served: Served) -> None:
    """Ordinary requests against windows one token longer or shorter: off by one would be seen."""
    ours = [first_token(served.engine, Ask(tuple(text.whole))) for text in served.texts]
    exact, noise = served.oracle.config["sliding_window"], served.ordinary()
    for window in (exact - 1, exact + 1):
        served.oracle.config["sliding_window"] = window
        try:
            found = distance(ours, [served.oracle.full_logprobs(text.whole) for text in served.texts])
        finally:
            served.oracle.config["sliding_window"] = exact
        assert found.kl > 4 * KL_FACTOR * noise.kl


def owners(llm: Any) -> tuple[list[str], int, int]:
    """Layers that records hold K and V of, and bytes of a token: in them, and as the pool counts them."""
    geometry = worker_of(llm).geometry
    each = sum(2 * a.kv_heads * a.head_size * a.dtype.itemsize for a in geometry.attention)
    return [a.layer for a in geometry.attention], each, geometry.page_bytes // geometry.page_tokens


def records_hold_what_layers_own(served: Served) -> None:
    """The last two of five layers read what others have."""
    layers, each, counted = served.engine.call(owners)
    assert [layer.split(".")[2] for layer in layers] == ["0", "1", "2"] and each == counted
