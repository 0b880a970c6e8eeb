"""Serves a hybrid model in two pipeline stages, each in a process of its own, as ``gpu_runner`` in one.

    TRITON_INTERPRET=1 python gpu_stages.py MODEL SEPARATOR [FAULT]

Prints, as a line of JSON, what that prints; how many passes were under way at most when another was
scheduled; of each record the transition blocks that the scheduler counts, and those that each stage holds.
"""

import json
import multiprocessing
import sys
from typing import Any

import gpu_runner
from vllm.v1.executor import multiproc_executor

PASS = 128
"""Tokens of a pass at most: so few that prompts take several, of which two are under way at once."""


def watch(core: Any) -> list[int]:
    """How many passes are under way whenever another is scheduled."""
    stock, seen = core.scheduler.schedule, [0]

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            seen.append(len(core.batch_queue))
        return output

    core.scheduler.schedule = schedule
    return seen


def held(worker: object) -> list[int]:
    """Transition blocks that this stage holds, by slot."""
    from vllm_hypic.engine.worker import worker_connector

    side = worker_connector()
    blocks = side.runtime.pool.transition_blocks  # type: ignore[union-attr]
    return [sum(int((row >= 0).sum()) for row in blocks.held(slot)) for slot in range(side.geometry.slots)]


def main() -> None:
    model, separator, *fault = sys.argv[1:]
    gpu_runner.pretend(*fault)
    # Processes that are forked are made of the same parts.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    llm = gpu_runner.start(model, pipeline_parallel_size=2, max_num_batched_tokens=PASS)
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    under_way = watch(core)
    answers = gpu_runner.answers(llm, int(separator))
    records = core.scheduler.hypic.directory.resident()
    counted = {entry.slot: entry.transition_blocks for entry in records}
    stages = core.model_executor.collective_rpc(held)
    books = [[count, *(stage[slot] for stage in stages)] for slot, count in counted.items()]
    print(json.dumps([answers, llm.collective_rpc("hypic_calls"), max(under_way), books]))


if __name__ == "__main__":
    main()
