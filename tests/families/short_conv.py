"""What is to be shown of short convolutions alone: a segment overwrites the state, so a record is its last
inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.engines import EngineError, worker_of

from .contract import BEHIND_A_TAIL, COMPOSED, ONE_TOKEN, Served, first_token, largest


def forget_tails(llm: Any, slots: Any = slice(None)) -> int:
    """Zeroes the tails of all records; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.conv_tail[slots] = 0
    return len(pool.linear)


def tails_are_the_records(served: Served) -> None:
    served.engine.reset()
    text, method = ONE_TOKEN, {"head": 8, "tail": 0}
    theirs = served.oracle.next_token_logprobs(text.lead, text.segments, text.query, **method)
    assert largest(first_token(served.engine, BEHIND_A_TAIL), theirs) <= served.bound
    (warm,) = served.engine.ask(BEHIND_A_TAIL)
    assert warm.cached > 500
    assert served.engine.call(forget_tails) == 3
    found = largest(first_token(served.engine, BEHIND_A_TAIL), theirs)
    served.engine.reset()
    assert found > 5 * served.bound, f"a forgotten tail goes unseen: {found:.1e}"


def naive_is_refused(served: Served) -> None:
    """It leaves a transition out, and there is none."""
    with pytest.raises(EngineError, match="'naive' leaves out the transition"):
        served.engine.ask(replace(COMPOSED, extra={"hypic_link": "naive"}))
