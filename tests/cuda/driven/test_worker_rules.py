"""What the worker does of ours beside the layers of a pass, watched as on a GPU: see ``device_rules.py``.

From a step's metadata to its report: positions, plans, prompts that penalties see, records that are complete.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import device_rules
import numpy as np
import pytest
import torch
from device_rules import OURS, Device, device
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_hypic.backends.linear.base import LinearLayer
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.engine import worker
from vllm_hypic.engine.cuda_worker import HypicGPUModelRunner
from vllm_hypic.pool import decoding, learned, transition_blocks
from vllm_hypic.pool import step as pool_step
from vllm_hypic.pool.copy.stream import CPUSideStream
from vllm_hypic.pool.geometry import AttentionGeometry, PoolGeometry
from vllm_hypic.pool.learned import LearnedRows
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.states import DecayGeometry, LinearGeometry

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
FLOAT = torch.float32
GEOMETRY = PoolGeometry(
    (AttentionGeometry("attention", 1, 8, FLOAT),),
    (LinearGeometry("delta", 2, 16, 16, 3, 24, FLOAT), DecayGeometry("decay", 2, 16, 16, 3, 24, FLOAT)),
    page_tokens=8,
    pages=4,
    slots=4,
    transition_blocks=8,
)
PLAN = StreamPlan(
    np.array([3, 4, 5, 11, 12]),
    13,
    (ComposePoint(3, 0, 2, False),),
    np.arange(2),
    np.arange(2),
    True,
    prompt=np.arange(13),
)


class Behind(CPUSideStream):
    """Of a device that runs behind: what is read back lies in memory of the host when it is looked at."""

    behind = True

    def read_back(self, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(value=lambda: torch.from_numpy(np.array(tensor.numpy())))


def indices(made: Any, output: Any, scheduled: np.ndarray) -> None:
    """What stock code writes: places in the streams."""
    behind = made.input_batch.num_computed_tokens_cpu
    at = np.concatenate([np.arange(s0, s0 + n) for s0, n in zip(behind, scheduled, strict=True)])
    made.positions[: len(at)] = made.mrope_positions.gpu[:, : len(at)] = torch.from_numpy(at)


class Worker:
    """A plain request, one that is composed, and segments: one of the learned context, then one that goes on
    from it."""

    def __init__(self, patch: Patch, mrope: bool = False) -> None:
        rows = torch.randn(1, 4, 1, 8)
        side = self.side = WorkerConnector(
            GEOMETRY, HypicConfig(), learned=LearnedRows(("attention",), rows, rows)
        )
        self.runtime = side.start(CPU)
        self.runtime.pool.transition_blocks.storage[:] = torch.eye(16)  # no head is dead
        side._copies = Behind()
        for name in self.runtime.pool.linear:
            layer: Any = LinearLayer()
            layer.prefix = name
            layer.connect(self.runtime)
        made: Any = HypicGPUModelRunner.__new__(HypicGPUModelRunner)
        made.positions, made.uses_mrope = torch.arange(100, 120), mrope
        made.mrope_positions = SimpleNamespace(gpu=torch.arange(100, 120).expand(3, -1).clone())
        self.runner, self.patch = made, patch
        patch.setattr(worker, "worker_connector", lambda: side)
        patch.setattr(GPUModelRunner, "_prepare_inputs", indices)

    def step(self, requests: dict[str, tuple[int, int]], **news: Any) -> Any:
        """A pass over these requests, each with so many tokens behind it and in the pass."""
        computed, scheduled = (np.array(part) for part in zip(*requests.values(), strict=True))
        self.runner.input_batch = SimpleNamespace(
            req_ids=list(requests),
            num_reqs=len(requests),
            num_computed_tokens_cpu=computed,
            vocab_size=99,
            sampling_metadata=SimpleNamespace(
                no_penalties=False, prompt_token_ids=self.penalised[: len(requests)]
            ),
        )
        self.runner._prepare_inputs(SimpleNamespace(kv_connector_metadata=HypicMetadata(**news)), scheduled)
        step = self.runtime.step
        for capture in [] if step is None else step.captures:
            if capture.last:  # as the layers do
                self.runtime.pool.transition_blocks.offer(capture.plan.slot)
        self.side.end_step()
        self.side.take_report()
        return step

    def run(self) -> Device:
        pool, made = self.runtime.pool, self.runner
        self.penalised = torch.full((3, 4), 99)
        slots, padded = np.arange(4), np.array([0, 1, 6, 7])
        first = CapturePlan(0, 4, 0, slots, padded, leading=False, learned=True)
        second = CapturePlan(0, 4, 1, slots + 8, None, leading=False, base=0)
        with device(self.patch) as here:
            here.own(made.positions, made.mrope_positions.gpu, self.penalised)
            here.own([vars(one) for one in (*pool.kv.values(), *pool.linear.values())])
            here.own(pool.transition_blocks.storage, pool.transition_blocks._tables)
            prefill = self.step({"plain": (5, 1), "one": (0, 4)}, captures={"one": (first,)})
            self.step(
                {"plain": (6, 1), "two": (0, 4), "ours": (1, 3)},
                captures={"two": (second,)},
                streams={"ours": PLAN},
            )
            self.step({"plain": (7, 1), "ours": (4, 1)}, finished={"one", "two"})
            decodes = [self.step({"plain": (8 + i, 1), "ours": (5 + i, 1)}) for i in range(2)]
            self.step({"plain": (10, 1)}, finished={"ours"}, dropped_slots=[0])
        assert prefill.captures and decodes[0].decoding is decodes[1].decoding is not None
        assert pool.transition_blocks.free < GEOMETRY.transition_blocks
        return here


@pytest.mark.parametrize("mrope", [False, True])
def test_the_worker_waits_for_nothing(mrope: bool, monkeypatch: Patch) -> None:
    made = Worker(monkeypatch, mrope)
    assert not made.run().broken
    # The composed request's last token: positions were rewritten, and penalties told of the prompt.
    assert made.runner.positions[:2].tolist() == [10, 14]


def read(step: Any, stock: Callable[..., Any] = pool_step.rewritten_positions) -> Any:
    found = stock(step)
    if found is not None:
        eval(compile("found[1][found[1].argmax()]", f"{OURS}planted.py", "eval"), {"found": found})
    return found


HOST = {
    "positions": (pool_step, "upload", "engine/worker.py"),
    "decodes": (decoding, "upload", "engine/worker.py"),
    "penalties": (worker, "upload", "engine/worker.py"),
    "blocks": (transition_blocks, "upload", "pool/transition_blocks.py"),
    "slots of a learned context": (learned, "upload", "pool/tensors.py"),
    "a learned context": (learned, "send", "pool/tensors.py"),
}
"""Names by which modules of the package upload, and where it shows that what one gave lies on the host."""


@pytest.mark.parametrize("what", HOST)
def test_what_stays_on_the_host_shows(what: str, monkeypatch: Patch) -> None:
    *upload, place = HOST[what]
    others = [named for named in device_rules.UPLOADS if named != tuple(upload)]
    assert len(others) < len(device_rules.UPLOADS)
    monkeypatch.setattr(device_rules, "UPLOADS", others)
    assert any(line.startswith(place) for line in Worker(monkeypatch).run().broken)


def test_a_number_as_an_index_shows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(worker, "rewritten_positions", read)
    assert Worker(monkeypatch).run().broken == {"planted.py:1: a number is read (item, bool, int)"}


def test_dead_heads_that_are_asked_for_at_once_show(monkeypatch: Patch) -> None:
    made = Worker(monkeypatch)
    made.side._copies = CPUSideStream()
    assert any(line.startswith("pool/transition_blocks.py") for line in made.run().broken)
