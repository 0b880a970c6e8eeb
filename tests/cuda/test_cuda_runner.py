"""The CUDA model runner's overrides, called with stand-ins for what surrounds them.

vLLM's own dispatcher of CUDA graphs is the real one; no graph is captured or replayed.
"""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_hypic.backends.attention.cuda import HypicCUDAAttentionImpl
from vllm_hypic.backends.attention.cuda_decode import DecodePlans
from vllm_hypic.backends.attention.cuda_rows import PARTIAL_BYTES, SHORTEST, span_pieces
from vllm_hypic.backends.cuda_support import scratch_bytes
from vllm_hypic.backends.linear.gdn.cuda import SUMMARY_BYTES, UNFILLED_BYTES, HypicCUDAGatedDeltaNet
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.connector.metadata import HypicMetadata
from vllm_hypic.connector.worker.connector import WorkerConnector
from vllm_hypic.engine import cuda_worker
from vllm_hypic.engine.cuda_graphs import ComposedBatch, ComposedGraphs
from vllm_hypic.engine.cuda_worker import HypicGPUModelRunner
from vllm_hypic.engine.worker import HypicModelRunner
from vllm_hypic.errors import ConfigError
from vllm_hypic.pool import step as pool_step
from vllm_hypic.pool import upload as upload_module
from vllm_hypic.pool.decoding import Decoding
from vllm_hypic.pool.geometry import PoolGeometry
from vllm_hypic.pool.plans import CapturePlan, ComposePoint, StreamPlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.step import Batch, BatchRow, StepContext, StreamTensors, capture_row, composed_row
from vllm_hypic.pool.tensors import DevicePool
from vllm_hypic.pool.upload import upload

CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch
SIZES = [1, 2, 4, 8]
NO_LAYERS = PoolGeometry((), (), 8, 0, 0)
PLAN = StreamPlan(
    np.array([3, 4, 5, 11, 12]), 13, (ComposePoint(3, 0, 2, False),), np.arange(2), np.arange(2), True
)


def runner(mode: CUDAGraphMode, drafts: int = 0) -> Any:
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=SIZES,
        splitting_ops=list(CompilationConfig._attention_ops),
    )
    compilation.max_cudagraph_capture_size = SIZES[-1]
    config = SimpleNamespace(
        compilation_config=compilation,
        num_speculative_tokens=drafts,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
    )
    made: Any = HypicGPUModelRunner.__new__(HypicGPUModelRunner)
    made.vllm_config, made.uniform_decode_query_len = config, 1 + drafts
    made.model_config = SimpleNamespace(is_encoder_decoder=False, dtype=torch.bfloat16)
    made.compilation_config, made.max_num_reqs, made.device = compilation, 8, CPU
    made.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    made.cudagraph_dispatcher = CudagraphDispatcher(config)  # type: ignore[arg-type]
    made.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + drafts)
    return made


def dispatched(made: Any, requests: int) -> CUDAGraphMode:
    """What the runner chooses for a pass in which each request decodes one token and all drafts."""
    each = made.uniform_decode_query_len
    mode, *_ = made._determine_batch_execution_and_padding(
        num_tokens=requests * each,
        num_reqs=requests,
        num_scheduled_tokens_np=np.full(requests, each, dtype=np.int32),
        max_num_scheduled_tokens=each,
    )
    return mode


@pytest.mark.parametrize(
    ("mode", "plain", "ours"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE),
        (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL, CUDAGraphMode.NONE),
        (CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE),
        (CUDAGraphMode.NONE, CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    ],
)
@pytest.mark.parametrize("drafts", [0, 1])
def test_passes_with_rows_of_ours_stay_out_of_full_graphs(
    monkeypatch: Patch, mode: CUDAGraphMode, plain: CUDAGraphMode, ours: CUDAGraphMode, drafts: int
) -> None:
    made, step = runner(mode, drafts), StepContext([], [], CPU)
    for now, wanted in ((None, plain), (step, ours), (None, plain)):
        monkeypatch.setattr(cuda_worker, "current_step", lambda now=now: now)
        assert dispatched(made, 3) is wanted


@pytest.mark.parametrize("drafts", [0, 1])
def test_passes_that_decode_replay_graphs_with_our_operators(monkeypatch: Patch, drafts: int) -> None:
    """Graphs beside stock's: captured after each, found for passes of composed rows alone, and where all that
    they read of ours was written before."""
    made = runner(CUDAGraphMode.FULL_AND_PIECEWISE, drafts)
    runtime = HypicRuntime(DevicePool(NO_LAYERS, CPU), 0.0)
    plans = DecodePlans()
    plans.most = 8
    heads = plans.made((4, 2, 32, torch.float32), CPU)
    monkeypatch.setattr(cuda_worker, "worker_connector", lambda: SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda_worker, "current_step", lambda: runtime.step)
    captures: list[tuple[CUDAGraphMode, BatchDescriptor, bool]] = []

    def capture(self: Any, desc: BatchDescriptor, mode: CUDAGraphMode) -> None:
        # As vLLM's dummy pass asks.
        each = self.uniform_decode_query_len
        requests = desc.num_tokens // each
        given = desc.num_tokens, requests, np.full(requests, each), each
        found, named, *_ = made._determine_batch_execution_and_padding(
            *given, force_uniform_decode=desc.uniform
        )
        assert found is mode
        captures.append((found, named, runtime.step is not None))

    monkeypatch.setattr(GPUModelRunner, "_warmup_and_capture", capture)
    if drafts == 0:
        made._graphs = ComposedGraphs(plans)
    for mode, descs in made.cudagraph_dispatcher.get_capture_descs():
        for desc in descs:
            made._warmup_and_capture(desc, mode)
    assert runtime.step is None
    ours = [named for _, named, with_step in captures if with_step]
    assert len({(mode, named) for mode, named, _ in captures}) == len(captures)
    assert all(isinstance(named, ComposedBatch) for named in ours)
    assert [named.num_tokens for named in ours] == ([] if drafts else [8, 4, 2, 1])

    columns = torch.arange(5)
    plan = StreamPlan(np.arange(2), 7, (ComposePoint(1, 0, 5, False),), np.arange(5), np.arange(5), True)
    decoding = Decoding.of(["a", "b", "c"], {1: (plan, columns, columns)}, np.array([9, 9, 9]), CPU)
    for step, wanted, written in (
        (StepContext([], [], CPU, decoding=decoding), CUDAGraphMode.FULL, True),
        (StepContext([], [], CPU), CUDAGraphMode.PIECEWISE, False),
        (StepContext([], [], CPU, decoding=replace(decoding, columns=10**9)), CUDAGraphMode.PIECEWISE, False),
        (None, CUDAGraphMode.FULL, False),
    ):
        heads.written, runtime.step = None, step
        assert dispatched(made, 3) is (wanted if drafts == 0 or step is None else CUDAGraphMode.PIECEWISE)
        assert (heads.written is decoding) is (written and drafts == 0)
    runtime.step = StepContext([], [], CPU, decoding=decoding)
    named = made._determine_batch_execution_and_padding(3, 3, np.ones(3, dtype=np.int32), 1)[1]
    assert isinstance(named, ComposedBatch) is (drafts == 0)
    assert "self._warmup_and_capture(" in inspect.getsource(GPUModelRunner._capture_cudagraphs)
    assert "concrete_cudagraph_entries[batch_descriptor]" in inspect.getsource(CUDAGraphWrapper)


def test_a_decode_pass_ends_where_something_composes() -> None:
    """The same object for the same requests, behind what they compose; positions as worked out one by one."""
    side = WorkerConnector(NO_LAYERS, HypicConfig())
    side.start(CPU)

    def begun(computed: list[int], metadata: HypicMetadata | None = None, each: int = 1) -> Any:
        given = np.array(computed), np.full(len(computed), each)
        return side.begin_step(metadata or HypicMetadata(), ["plain", "ours"], *given)

    assert begun([5, 4], HypicMetadata(streams={"ours": PLAN})).decoding is None  # the prompt's last token
    step = begun([6, 5])
    again = begun([7, 6])
    assert step.decoding is again.decoding is not None
    [row] = again.composed
    assert (row.row.index, row.row.q0, row.row.s0, row.row.s1) == (1, 1, 6, 7)
    one_by_one = pool_step.rewritten_positions(StepContext(list(again.composed), [], CPU))
    made = runner(CUDAGraphMode.NONE)
    made.positions, made.uses_mrope = torch.tensor([7, 6, 99]), False
    made._rewrite_positions(again)
    assert made.positions.tolist() == [7, int(one_by_one[1]), 99] and one_by_one[0].tolist() == [1]
    assert begun([7, 6], each=2).decoding is None  # drafts
    assert begun([8, 3]).decoding is None  # preempted, and in its prompt again
    assert begun([8, 7]).decoding is not None
    assert begun([9, 8], HypicMetadata(streams={"ours": replace(PLAN, n_logical=20)})).decoding.shifts == 15
    capturing = HypicMetadata(captures={"plain": (CapturePlan(0, 4, 0, np.arange(4), None, leading=False),)})
    assert begun([10, 9], capturing).decoding is None
    side._captures["plain"] = ()  # as `end_step` leaves a request whose captures have all run
    assert begun([11, 10]).decoding is not None


def test_while_vllm_starts_there_is_no_step() -> None:
    """Profiling and capture come before the connector: the override must not ask it."""
    assert cuda_worker.current_step() is None
    assert dispatched(runner(CUDAGraphMode.FULL_AND_PIECEWISE), 3) is CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("blocks", "states", "mode", "refused"),
    [
        (7, True, CUDAGraphMode.FULL_AND_PIECEWISE, True),
        (8, True, CUDAGraphMode.FULL_AND_PIECEWISE, False),
        (7, False, CUDAGraphMode.FULL_AND_PIECEWISE, False),
        (7, True, CUDAGraphMode.PIECEWISE, False),
    ],
)
def test_a_pool_that_leaves_too_few_states_is_named(
    monkeypatch: Patch, blocks: int, states: bool, mode: CUDAGraphMode, refused: bool
) -> None:
    """vLLM's own sentence names what its user cannot know to be the cause."""
    made, reached = runner(mode), list[object]()
    config = SimpleNamespace(num_blocks=blocks, has_mamba_layers=states)
    monkeypatch.setattr(HypicModelRunner, "initialize_kv_cache", lambda self, *given: reached.append(given))
    if refused:
        with pytest.raises(ConfigError, match=r"7 blocks of states .* lower --max-num-seqs to 7, or lower "):
            made.initialize_kv_cache(config)
        made.initialize_kv_cache(config, True)  # vLLM's estimate of what graphs take
        assert reached == [(config, True)]
    else:
        made.initialize_kv_cache(config)
        assert reached == [(config, False)]
    assert "max_num_reqs > kv_cache_config.num_blocks" in inspect.getsource(CompilationConfig)


class Layer(AttentionLayerBase):
    """Full attention; with a ``window`` there is no full graph for passes with rows of ours."""

    def __init__(self, window: int | None) -> None:
        self.impl = HypicCUDAAttentionImpl(4, 128, 1.0, 2, None, window, "auto")
        self.impl.vllm_flash_attn_version = 2

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("window", "each"), [(None, 2), (64, 1)])
def test_vllm_counts_the_memory_of_our_graphs(window: int | None, each: int, monkeypatch: Patch) -> None:
    """Its own estimate, where a graph takes what is said here: those with our operators, captured beside its
    own of the same sizes, are in it."""
    made, taken, captured = runner(CUDAGraphMode.FULL_DECODE_ONLY), 3 << 20, set[BatchDescriptor]()
    made.compilation_config.static_forward_context["layer"] = Layer(window)
    made.lora_config, made.max_model_len, made.max_num_tokens = None, 64, 64

    def capture(self: Any, desc: BatchDescriptor, cudagraph_runtime_mode: CUDAGraphMode, **_: Any) -> None:
        rows = np.ones(desc.num_tokens, dtype=np.int32)
        found = self._determine_batch_execution_and_padding(desc.num_tokens, desc.num_tokens, rows, 1)
        assert found[0] is cudagraph_runtime_mode
        captured.add(found[1])

    def minimal(self: Any) -> None:
        self.initialize_kv_cache(SimpleNamespace(num_blocks=8, has_mamba_layers=False), is_profiling=True)

    monkeypatch.setattr(GPUModelRunner, "_warmup_and_capture", capture)
    monkeypatch.setattr(GPUModelRunner, "_init_minimal_kv_cache_for_profiling", minimal)
    monkeypatch.setattr(GPUModelRunner, "_freeze_gc", staticmethod(nullcontext))
    monkeypatch.setattr(HypicModelRunner, "initialize_kv_cache", lambda *given: None)
    for one in ("_create_encoder_cudagraph_manager", "_cleanup_profiling_kv_cache", "maybe_remove_all_loras"):
        monkeypatch.setattr(GPUModelRunner, one, lambda *given: None)
    for name in ("set_current_vllm_config", "graph_capture"):
        monkeypatch.setattr(gpu_model_runner, name, lambda *given, **more: nullcontext())
    monkeypatch.setattr(gpu_model_runner, "current_platform", SimpleNamespace(graph_pool_handle=object))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda: ((1 << 40) - taken * len(captured), 1 << 40)
    )
    assert made.profile_cudagraph_memory() == each * len(SIZES) * taken
    assert sum(isinstance(desc, ComposedBatch) for desc in captured) == len(captured) * (each - 1) // each
    made.initialize_kv_cache(SimpleNamespace(num_blocks=8, has_mamba_layers=False), is_profiling=True)
    assert made._counts_twice is (each == 2) and made._named is None
    assert "self.model_runner.profile_cudagraph_memory()" in inspect.getsource(Worker)


def test_buffers_of_decode_passes_are_left_to_them() -> None:
    made = runner(CUDAGraphMode.FULL_DECODE_ONLY)
    assert made.decode_bytes() == 0
    made.compilation_config.static_forward_context["layer"] = Layer(None)
    plans = DecodePlans()
    plans.most = made.max_num_reqs
    fixed = plans.made((4, 2, 128, torch.bfloat16), CPU)
    buffers = fixed._packed.nbytes + fixed._columns.nbytes
    # A row's result, and one for each part.
    results = 8 * 4 * 128 * 4 + sum(work.partial_rows for work in fixed.plan(8).work) * 2 * 128 * 4
    assert buffers + results < made.decode_bytes() < 1.1 * (buffers + results)
    made.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    assert made.decode_bytes() == buffers


def test_what_operators_take_is_left_to_them() -> None:
    """By the largest layer, and by all that carry."""
    attention: Any = SimpleNamespace(impl=HypicCUDAAttentionImpl(4, 128, 1.0, 2, None, None, "auto"))
    linear: Any = HypicCUDAGatedDeltaNet.__new__(HypicCUDAGatedDeltaNet)
    torch.nn.Module.__init__(linear)
    linear.num_v_heads, linear.tp_size, linear.head_k_dim, linear.head_v_dim = 8, 2, 128, 128
    linear.conv_dim = 4096
    half, rows = torch.bfloat16, 1000
    assert scratch_bytes([object()], rows, half) == 0
    public = scratch_bytes([attention, attention], rows, half)
    # Beside partial results, the result of span attention is the largest part.
    assert rows * 4 * 128 * 4 < public - PARTIAL_BYTES < 3 * rows * 4 * 128 * 4
    carried = 2 * 4 * 128 * 256 * 4
    delta = scratch_bytes([linear], rows, half)
    # Rows, and as many summaries of interiors as there may be at once.
    summary = 4 * (3 * 128 * 128 + 1) * 4
    assert SUMMARY_BYTES - summary < 341 * summary <= SUMMARY_BYTES
    terms = 4 * 320 * 4
    lacking = UNFILLED_BYTES // terms * terms
    assert delta == rows * (terms + 2048 * 2) + 341 * summary + lacking + carried
    assert scratch_bytes([linear], 7, half) == 7 * (32 * terms + 2048 * 2 + summary) + carried
    all_of_them = scratch_bytes([attention, linear, linear], rows, half)
    assert all_of_them == max(public, delta - carried) + 2 * carried


def test_partial_results_are_bounded() -> None:
    """Two requests of many rows over many columns, and one of few, are attended in pieces that are small
    enough and together are all rows, in order."""
    counts, columns = [3000, 1, 5000], 40000
    starts = [0, *np.cumsum(counts).tolist()]
    points = (ComposePoint(0, 0, columns, False),)
    plan = StreamPlan(np.arange(9000), 9000, points, np.arange(columns), np.arange(columns), True)
    stream = StreamTensors.of(plan, CPU)
    at_rows = [BatchRow(i, starts[i], starts[i + 1], 10, 10 + n) for i, n in enumerate(counts)]
    step = StepContext([composed_row(row, stream) for row in at_rows], [], CPU)
    runtime = HypicRuntime(DevicePool(NO_LAYERS, CPU), 0.0)
    public, heads = step.attention_rows(None, 0).merged, (16, 2, 256, torch.bfloat16)
    pieces = span_pieces(runtime, step, public, heads)
    assert len(pieces) > 1
    at = 0
    for piece in pieces:
        assert piece.rows.start == at and piece.plan.rows == piece.rows.stop - at
        assert piece.plan.token_rows.tolist() == list(range(at, piece.rows.stop))
        partial = sum(work.partial_rows for work in piece.plan.work)
        assert partial * 2 * 256 * 4 <= PARTIAL_BYTES or piece.plan.rows <= SHORTEST
        at = piece.rows.stop
    assert at == sum(counts)
    assert span_pieces(runtime, step, public, heads) is pieces


@pytest.mark.parametrize("mrope", [False, True])
def test_logical_positions_are_written_into_the_persistent_buffers(mrope: bool) -> None:
    made: Any = HypicGPUModelRunner.__new__(HypicGPUModelRunner)
    stock = torch.arange(100, 116)
    made.positions, made.uses_mrope = stock.clone(), mrope
    made.mrope_positions = SimpleNamespace(gpu=stock.expand(3, -1).clone())
    buffers = made.positions.data_ptr(), made.mrope_positions.gpu.data_ptr()
    # A composed prefill, a plain request, a composed decode beyond its prompt, a padded segment request.
    stream, own = StreamTensors.of(PLAN, CPU), np.arange(4)
    composed = [composed_row(BatchRow(0, 0, 3, 1, 4), stream), composed_row(BatchRow(2, 5, 7, 4, 6), stream)]
    captures = [
        capture_row("a", BatchRow(3, 7, 9, 1, 3), CapturePlan(0, 4, 0, own, np.array([0, 1, 6, 7]), False)),
        capture_row("b", BatchRow(4, 9, 10, 0, 1), CapturePlan(0, 4, 0, own, None, leading=False)),
    ]
    batch = Batch.of(np.array([1, 9, 4, 1, 0]), np.array([3, 2, 2, 2, 1]))
    made._rewrite_positions(StepContext(composed, captures, CPU, batch))
    # Generated tokens go on at the prompt's logical length.
    wanted = [4, 5, 11, 103, 104, 12, 13, 1, 6, *range(109, 116)]
    assert made.positions.tolist() == wanted
    assert made.mrope_positions.gpu.tolist() == ([wanted] * 3 if mrope else [stock.tolist()] * 3)
    assert buffers == (made.positions.data_ptr(), made.mrope_positions.gpu.data_ptr())


def test_a_pass_without_rewritten_positions_copies_nothing() -> None:
    plan = CapturePlan(0, 4, 0, np.arange(4), None, leading=False)
    capture = capture_row("b", BatchRow(0, 0, 4, 0, 4), plan)
    assert pool_step.rewritten_positions(StepContext([], [capture], CPU)) is None


def test_arrays_travel_together_and_keep_their_shapes() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.zeros((0,), dtype=np.int64), np.array([7], dtype=np.int32)]
    packed = upload_module._packed(arrays, pinned=False)
    assert packed.tolist() == [0, 1, 2, 3, 4, 5, 7]
    found = upload_module._parts(packed, arrays)
    assert [t.tolist() for t in found] == [[[0, 1, 2], [3, 4, 5]], [], [7]]
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    for tensor, array in zip(upload(arrays, CPU), arrays, strict=True):
        assert tensor.dtype == torch.int64 and tensor.tolist() == array.tolist()
    assert upload([], CPU) == upload_module._parts(upload_module._packed([], pinned=False), []) == []
    shapes = [tuple(t.shape) for t in upload(arrays, torch.device("meta"))]
    assert shapes == [(2, 3), (0,), (1,)]
