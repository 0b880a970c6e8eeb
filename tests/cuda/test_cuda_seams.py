"""Where the CUDA path meets vLLM's sources: what it overrides is there and is what vLLM calls.

Nothing here runs on a GPU, nor shows that vLLM does.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_hypic.backends.attention.base import PublicAttention
from vllm_hypic.backends.attention.cuda import HypicCUDAAttentionBackend, HypicCUDAAttentionImpl
from vllm_hypic.backends.linear import gdn, mamba2, short_conv
from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet
from vllm_hypic.backends.linear.mamba2.cuda import HypicCUDAMamba2, _Chunks
from vllm_hypic.backends.linear.mamba_rows import MambaRows, _counts
from vllm_hypic.backends.linear.short_conv.cuda import HypicCUDAShortConv
from vllm_hypic.backends.ops import gated_delta
from vllm_hypic.backends.ops import mamba2 as mamba2_operators
from vllm_hypic.engine.activation import CUDA_WORKER
from vllm_hypic.engine.cuda_worker import HypicGPUModelRunner, HypicGPUWorker
from vllm_hypic.patches import cuda_kept_lse
from vllm_hypic.patches.signature import PatchError


def test_the_worker_is_found_by_its_path() -> None:
    assert resolve_obj_by_qualname(CUDA_WORKER) is HypicGPUWorker
    assert issubclass(HypicGPUWorker, Worker) and issubclass(HypicGPUModelRunner, GPUModelRunner)


def test_the_stock_call_leaves_its_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has it patched; another vLLM's kernel, or a forward pass that calls another, is refused."""
    assert "cuda_kept_lse.apply()" in inspect.getsource(HypicGPUWorker.init_device)
    kernel: Any = flash_attn.FA4DenseAttentionKernel
    stock = kernel.__call__
    monkeypatch.setattr(kernel, "__call__", stock)
    cuda_kept_lse.apply()
    patched = kernel.__call__
    cuda_kept_lse.apply()
    assert kernel.__call__ is patched is not stock
    monkeypatch.setattr(kernel, "__call__", lambda self, query: query)
    with pytest.raises(PatchError, match="supports vLLM"):
        cuda_kept_lse.apply()
    monkeypatch.setattr(kernel, "__call__", stock)
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self: None)
    with pytest.raises(PatchError, match="_FA4_DENSE_ATTENTION_KERNEL"):
        cuda_kept_lse.apply()


def test_the_worker_makes_our_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's worker has a method for it, called where it has none of its own to call."""
    assert "self._make_model_runner()" in inspect.getsource(Worker._init_workspace_and_model_runner)
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(HypicGPUModelRunner, "__init__", lambda self, *args: made.append(args))
    worker: Any = HypicGPUWorker.__new__(HypicGPUWorker)
    worker.vllm_config, worker.device, worker.use_v2_model_runner = "config", "device", False
    assert isinstance(worker._make_model_runner(), HypicGPUModelRunner) and made == [("config", "device")]
    worker.use_v2_model_runner = True
    with pytest.raises(RuntimeError, match="V1 model runner"):
        worker._make_model_runner()


def test_overridden_methods_keep_their_parameters() -> None:
    for ours, stock, name in (
        (HypicCUDAAttentionImpl, FlashAttentionImpl, "forward"),
        (HypicCUDAGatedDeltaNet, QwenGatedDeltaNetAttention, "_forward_core"),
        (HypicCUDAGatedDeltaNet, QwenGatedDeltaNetAttention, "_forward_core_fused_norm_packed"),
        (HypicCUDAMamba2, MambaMixer2, "conv_ssm_forward"),
        (HypicCUDAMamba2, MambaMixer2, "get_kv_cache_spec"),
        (HypicCUDAShortConv, ShortConv, "forward_cuda"),
        (HypicCUDAAttentionBackend, flash_attn.FlashAttentionBackend, "supports_head_size"),
    ):
        found, wanted = (list(inspect.signature(getattr(c, name)).parameters) for c in (ours, stock))
        assert found == wanted, name


def test_metadata_has_what_is_read_and_replaced() -> None:
    assert "block_table" in flash_attn.FlashAttentionMetadata.__dataclass_fields__
    source = inspect.getsource(HypicCUDAGatedDeltaNet.sub_batch)
    fields = set(GDNAttentionMetadata.__dataclass_fields__)
    unused = {"checkpoint", "aiter_prefill_metadata", "flashinfer_checkpoint_plan"}  # 0.33's, too
    # Requests that decode with drafts are the same in the sub-batch.
    same = {"num_spec_decodes", "num_spec_decode_tokens", "spec_query_start_loc", "num_accepted_tokens"}
    same |= {"spec_state_indices_tensor", "uniform_spec_sequence_length"}
    assert same < fields
    left_out = {name for name in fields - unused - same if f" {name}=" not in source}
    assert not left_out, f"stale in a sub-batch: {left_out}"


def test_metadata_of_mamba2_and_short_convolutions_is_made_whole() -> None:
    """All fields that the stock layer looks at without replayed states and checkpoints, which never are."""
    replayed = {"write_pos_d", "is_flush_d", "bc_pre_scratch", "replayssm_scratch"}
    replayed |= {"replayssm_state_indices_d"}
    common = inspect.getsource(MambaRows.fields) + inspect.getsource(_counts)
    chunked = inspect.getsource(HypicCUDAMamba2.sub_batch)
    fields = Mamba2AttentionMetadata.__dataclass_fields__
    left_out = {name for name in fields if f"{name}=" not in common + chunked}
    assert left_out == replayed | {"checkpoint_chunk_idx", "checkpoint_meta"}
    fields = ShortConvAttentionMetadata.__dataclass_fields__
    of_scans = {"cu_chunk_seqlen_p", "last_chunk_indices_p"}
    assert {name for name in fields if f"{name}=" not in common} == replayed | of_scans
    chunks = inspect.signature(Mamba2AttentionMetadataBuilder._compute_chunk_metadata).parameters
    given = ["chunk_size", "num_prefills", "num_computed_tokens_p_cpu", "query_start_loc_p_cpu"]
    assert list(chunks)[:4] == given and "_compute_chunk_metadata" in inspect.getsource(_Chunks.of)


def test_mamba2_promises_no_states_inside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock code does; whoever reads the promise would find nothing there of composed requests."""
    spec = MambaSpec(block_size=8, shapes=((3, 8), (1, 4, 4)), dtypes=(torch.float32,) * 2)
    monkeypatch.setattr(MambaBase, "get_kv_cache_spec", lambda self, config: spec)
    layer: Any = HypicCUDAMamba2.__new__(HypicCUDAMamba2)
    stock = MambaMixer2.get_kv_cache_spec(layer, None)
    assert isinstance(stock, MambaSpec) and stock.num_prefill_checkpoint_blocks == 1
    assert layer.get_kv_cache_spec(None).num_prefill_checkpoint_blocks == 0


def test_our_implementation_stands_before_the_stock_one() -> None:
    order = HypicCUDAAttentionImpl.__mro__
    assert order.index(PublicAttention) < order.index(FlashAttentionImpl)
    assert HypicCUDAAttentionImpl.do_kv_cache_update is FlashAttentionImpl.do_kv_cache_update
    assert HypicCUDAAttentionBackend.get_impl_cls() is HypicCUDAAttentionImpl
    assert not HypicCUDAAttentionBackend.forward_includes_kv_cache_update


def test_the_layer_of_each_platform() -> None:
    for cuda, platform in ((True, "CUDA"), (False, "CPU")):
        for module, name in ((gdn, "GatedDeltaNet"), (mamba2, "Mamba2"), (short_conv, "ShortConv")):
            assert module._layer_class(cuda=cuda).__name__ == f"Hypic{platform}{name}"
        names = [layer.__name__ for layer in gdn._kimi_classes(cpu=not cuda)]
        assert names == [f"Hypic{platform}KimiDeltaNet", f"Hypic{platform}BailingDeltaNet"]
    # One is refused by name.
    olmo = gdn._olmo_class(cpu=False)
    refusal = "OLMo-Hybrid's gated delta net on this platform (served: CPU)"
    assert olmo.refusal(olmo.__new__(olmo)) == refusal
    assert gdn._olmo_class(cpu=True).__name__ == "HypicCPUOlmoDeltaNet"
    operators = {"mamba_mixer2", "short_conv", "olmo_hybrid_gdn_full_forward"}
    assert {f"vllm::{name}" for name in operators} <= set(CompilationConfig._attention_ops)


@pytest.mark.parametrize(
    ("ours", "method", "operator", "widths"),
    [
        (HypicCUDAGatedDeltaNet, "core", qwen_gdn_linear_attn.qwen_gdn_attention_core, (8, 2, 2, 4)),
        (HypicCUDAMamba2, "run", mamba_mixer2.mamba_mixer2, (8, 4)),
    ],
    ids=["gated delta net", "Mamba2"],
)
def test_stock_operators_call_the_method_that_is_ours(
    ours: Any, method: str, operator: Any, widths: tuple[int, ...]
) -> None:
    """So a graph that stock vLLM compiled reaches our core, too."""
    layer, given = bare(ours), list[Any]()
    setattr(layer, method, lambda *args: given.extend(getattr(x, "projected", x) for x in args))
    tensors = [torch.ones(2, n) for n in widths]
    context = ForwardContext(no_compile_layers={"layer": layer}, attn_metadata={}, slot_mapping={})
    with override_forward_context(context):
        operator(*tensors, "layer")
    assert [id(x) for x in given] == [id(x) for x in tensors] and given[-1].all()


def bare(kind: Any) -> Any:
    """A layer without anything in it."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    return layer


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logits_soft_cap", 30.0, "logits soft-cap 30.0"),
        ("alibi_slopes", torch.ones(4), "ALiBi"),
        ("kv_sharing_target_layer_name", "layers.3", "KV shared with layer layers.3"),
        ("kv_cache_dtype", "fp8_e4m3", "a KV cache in FP8 with FlashAttention None (served: 3)"),
        ("attn_type", "encoder_only", "attention of kind encoder_only"),
        ("dcp_world_size", 2, "a KV cache divided among 2 ranks"),
        ("head_size", 260, "head size 260"),
    ],
)
def test_layers_are_refused(field: str, value: object, says: str) -> None:
    impl = HypicCUDAAttentionImpl(4, 128, 1.0, 2, None, None, "auto")
    assert impl.refusal(None) is None
    setattr(impl, field, value)
    assert (reason := impl.refusal(None)) is not None and says in reason


def test_fp8_is_served_with_flash_attention_3() -> None:
    """Which vLLM hands a query in FP8, too, and scales of the layer."""
    impl = HypicCUDAAttentionImpl(4, 128, 1.0, 2, None, None, "auto")
    plain = impl.scratch_bytes(1000, torch.bfloat16)
    impl.kv_cache_dtype, impl.vllm_flash_attn_version = "fp8", 3
    assert impl.refusal(None) is None
    assert impl.scratch_bytes(1000, torch.bfloat16) - plain == 1000 * 4 * 128 * 2
    impl.vllm_flash_attn_version = 4
    assert impl.refusal(None) == "a KV cache in FP8 with FlashAttention 4 (served: 3)"
    assert not HypicCUDAAttentionBackend.supports_per_head_quant_scales()
    stock = inspect.getsource(FlashAttentionImpl.forward)
    for scale in ("q_descale=q_descale", "k_descale=k_descale", "v_descale=v_descale"):
        assert scale in stock
    assert "layer._q_scale.expand(descale_shape)" in stock and "key_cache.view(current_platform" in stock
    assert "self.query_quant(query, self._q_scale)" in inspect.getsource(Attention.forward)


def test_windows_and_sinks_are_served() -> None:
    impl = HypicCUDAAttentionImpl(4, 128, 1.0, 2, None, 64, "auto")
    assert impl.window() == 64  # as vLLM stores it
    impl.sinks = torch.zeros(4)
    assert impl.sliding_window == (63, 0) and impl.refusal(None) is None


def test_linear_layers_ask_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    delta, scanned, convolved = map(bare, (HypicCUDAGatedDeltaNet, HypicCUDAMamba2, HypicCUDAShortConv))
    state, asked = torch.empty(1, 2, 96, 128), list[Any]()
    delta._views = SimpleNamespace(
        of=0, state=state, weights="weights", caches=lambda slots: SimpleNamespace(state=state)
    )
    delta.kv_cache = (0, 0)
    scanned._constants, scanned.conv_kernel_size = "weights", 4
    scanned.kv_cache = torch.empty(1, 3, 8), torch.empty(1, 2, 64, 96)
    for layer, module, wanted, name in (
        (delta, gated_delta, state, "gated delta net"),
        (scanned, mamba2_operators, scanned.kv_cache[1], "Mamba2"),
    ):
        monkeypatch.setattr(module, "refuses", lambda *given: asked.append(given))
        assert layer.kernel_refusal() is None
        assert asked[-1][0] == "weights" and asked[-1][1].state is wanted
        monkeypatch.setattr(module, "refuses", lambda *given: "states of size 96")
        assert layer.kernel_refusal() == f"{name} with states of size 96"
    assert len(asked) == 2
    convolved._constants = SimpleNamespace(weight=torch.empty(3, 8))
    convolved.kv_cache = (torch.empty(1, 2, 8),)
    assert convolved.kernel_refusal() == "short convolution with cpu tensors"


@pytest.mark.parametrize(
    ("asked", "gets"),
    [
        (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE),
        (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE),
        (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_DECODE_ONLY),
        (CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE),
        (CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    ],
)
def test_no_full_graphs_of_mixed_batches(asked: CUDAGraphMode, gets: CUDAGraphMode) -> None:
    """vLLM asks the builder of each backend what it supports and settles the mode by the least."""
    builder = HypicCUDAAttentionBackend.get_builder_cls()
    support = builder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    assert issubclass(builder, flash_attn.FlashAttentionMetadataBuilder)
    # Without the override FlashAttention 3 would keep what was asked for.
    for supported, backend, mode in ((support, "HYPIC", gets), (AttentionCGSupport.ALWAYS, "", asked)):
        config = CompilationConfig(cudagraph_mode=asked, splitting_ops=list(CompilationConfig._attention_ops))
        assert config.resolve_cudagraph_mode_and_sizes(supported, backend) is mode


def test_the_worker_runs_the_model_before_there_is_a_cache() -> None:
    """In that pass a later pipeline stage makes room for what it is sent; with a given size of cache, too."""
    source = inspect.getsource(Worker.determine_available_memory)
    assert source.count("self.model_runner.profile_run(") == 2
    assert "self.intermediate_tensors = (" in inspect.getsource(GPUModelRunner._dummy_run)
