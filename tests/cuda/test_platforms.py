"""What serves each example on each generation of GPUs, and latent attention: vLLM's own choice, on pretended
platforms; ours is made of that one."""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.config import CompilationConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport, MLAAttentionImpl
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hypic.backends.attention import cuda_mla
from vllm_hypic.backends.attention.cuda_mla import CUDALatentAttention
from vllm_hypic.backends.attention.latents import LatentAttention
from vllm_hypic.backends.cuda_support import FLASHINFER_HEADS, scratch_bytes
from vllm_hypic.engine.activation import complete
from vllm_hypic.errors import ConfigError
from vllm_hypic.patches import backend_name, cuda_backend_choice

Pretend = Callable[[str], Any]
"""Makes this process's platform that of a GPU of this name."""
MODELS = Path(__file__).parents[2] / "examples" / "models"
EXAMPLES = sorted(path.parent.name for path in MODELS.glob("*/model"))
CUDA_BACKEND = "vllm_hypic.backends.attention.cuda.HypicCUDAAttentionBackend"
CHOSEN_HERE = "vllm_hypic.backends.attention.backend"
"""The module that asks the platform when it is imported."""
GPUS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}


@pytest.fixture(scope="module")
def made() -> dict[str, VllmConfig]:
    """Of this machine's platform, before any pretending."""
    found = {}
    for name in EXAMPLES:
        args = EngineArgs(model=str(MODELS / name / "model"), attention_backend="hypic", enforce_eager=True)
        found[name] = args.create_engine_config()
    return found


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """vLLM's CUDA platform of a GPU, with CUDA 13 and without its library."""
    name = "vllm._C_stable_libtorch"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    backend_name.apply()
    stock = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase

    def pretend(gpu: str) -> Any:
        class Pretended(stock):  # type: ignore[misc]
            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
                return DeviceCapability(*GPUS[gpu])

            @classmethod
            def get_cuda_runtime_major(cls) -> int:
                return 13

        cuda_backend_choice.apply_to(Pretended)
        found = Pretended()
        monkeypatch.setattr(vllm.platforms, "_current_platform", found)
        monkeypatch.setattr(qwen_gdn_linear_attn, "current_platform", found)
        return found

    before = sys.modules.pop(CHOSEN_HERE, None)
    yield pretend
    sys.modules.pop("vllm.platforms.cuda")
    sys.modules.pop(CHOSEN_HERE, None)
    if before is not None:
        sys.modules[CHOSEN_HERE] = before


def config_of(made: VllmConfig, heads: tuple[int, int] | None, **options: Any) -> VllmConfig:
    """A copy with linear heads of such sizes, ``None``: the example's own; ``options``: additional ones."""
    config = copy.copy(made)
    config.model_config = copy.copy(made.model_config)
    config.model_config.dtype = torch.bfloat16
    text = copy.copy(made.model_config.hf_text_config)
    if heads is not None:
        text.linear_key_head_dim, text.linear_value_head_dim = heads
    config.model_config.hf_text_config = text
    config.additional_config = {**made.additional_config, **options}
    return config


def prefill_of(config: VllmConfig) -> str:
    """What vLLM prefills gated delta nets with."""
    return qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_has_its_backends(
    made: dict[str, VllmConfig], platform: Pretend, name: str, gpu: str
) -> None:
    found = platform(gpu)
    config = config_of(made[name], None)
    text = config.model_config.hf_text_config
    sizes = text.linear_key_head_dim, text.linear_value_head_dim
    assert sizes != FLASHINFER_HEADS, "the case that this is about"
    complete(config)
    assert prefill_of(config) == "triton"
    asked = AttentionSelectorConfig(text.head_dim, torch.bfloat16, "auto", None)
    assert found.get_attn_backend_cls(Backend["HYPIC"], asked) == CUDA_BACKEND


@pytest.mark.parametrize(
    ("heads", "gpu", "backend"),
    [
        ((128, 128), "A100", "triton"),
        ((128, 128), "H100", "flashinfer"),
        ((128, 128), "B200", "flashinfer"),
        ((128, 128), "RTX 5090", "flashinfer"),
        # vLLM looks at neither on Hopper, and on Blackwell at K alone.
        ((128, 64), "H100", "triton"),
        ((128, 64), "B200", "triton"),
        ((64, 128), "H100", "triton"),
    ],
)
def test_flash_infer_prefills_what_it_is_made_for(
    made: dict[str, VllmConfig], platform: Pretend, heads: tuple[int, int], gpu: str, backend: str
) -> None:
    platform(gpu)
    config = config_of(made[EXAMPLES[0]], heads)
    left_alone = prefill_of(config)
    complete(config)
    assert prefill_of(config) == backend
    if heads[0] == 128 or gpu == "H100":
        assert left_alone == ("triton" if gpu == "A100" else "flashinfer")


def test_what_it_is_not_made_for_is_refused_where_it_is_asked_for(
    made: dict[str, VllmConfig], platform: Pretend
) -> None:
    platform("H100")
    config = config_of(made[EXAMPLES[0]], None, gdn_prefill_backend="FlashInfer")
    with pytest.raises(ConfigError, match=r"'flashinfer' with linear heads of 64 and 64: .* use 'triton'"):
        complete(config)
    complete(config_of(made[EXAMPLES[0]], (128, 128), gdn_prefill_backend="flashinfer"))
    complete(config_of(made[EXAMPLES[0]], None, gdn_prefill_backend="triton"))


LATENTS = AttentionSelectorConfig(576, torch.bfloat16, "auto", None, use_mla=True)


@pytest.fixture
def ampere(platform: Pretend) -> Any:
    """With the patch, which leaves the stock class as it is, twice."""
    found = type(platform("A100"))
    cuda_backend_choice.apply_to(found)
    assert "_hypic" not in vars(found.__mro__[1].get_attn_backend_cls.__func__)
    return found


def test_ours_is_made_of_vllms_choice(ampere: Any) -> None:
    """FlashAttention's and FlashMLA's are for newer GPUs."""
    assert ampere.get_attn_backend_cls(None, LATENTS) == Backend.TRITON_MLA.get_path()
    ours = resolve_obj_by_qualname(ampere.get_attn_backend_cls(Backend["HYPIC"], LATENTS, num_heads=16))
    assert ours.__name__ == "HypicTritonMLABackend" and issubclass(ours, TritonMLABackend)
    assert resolve_obj_by_qualname(".".join(ours.full_cls_name())) is ours
    # What vLLM decides by the name, it decides as it would.
    assert ours.get_name() == "TRITON_MLA"


@pytest.mark.parametrize("name", cuda_backend_choice.SERVED)
def test_each_choice_has_a_class(ampere: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[Backend] = []
    monkeypatch.setattr(cuda_mla, "backend_of", lambda backend: made.append(backend))
    monkeypatch.setattr(ampere, "get_valid_backends", classmethod(lambda cls, **_: ([candidate(name)], {})))
    resolve_obj_by_qualname(ampere.get_attn_backend_cls(Backend.CUSTOM, LATENTS))
    assert made == [Backend[name]]


def candidate(name: str) -> Any:
    """What vLLM chooses among, of a backend that cannot be imported here."""
    module, _, qualname = Backend[name].get_path().rpartition(".")
    cls = type(qualname, (), {"full_cls_name": classmethod(lambda cls: (module, qualname))})
    return importlib.import_module("vllm.platforms.cuda")._BackendCandidate(cls, Backend[name], 0)


def test_other_choices_are_refused_by_name(ampere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = [candidate("TOKENSPEED_MLA")]
    monkeypatch.setattr(ampere, "get_valid_backends", classmethod(lambda cls, **_: (other, {})))
    with pytest.raises(ConfigError, match=r"latent attention by TokenspeedMLABackend, .* FLASH_ATTN_MLA, "):
        ampere.get_attn_backend_cls(Backend.CUSTOM, LATENTS)


def test_sparse_attention_is_refused(ampere: Any) -> None:
    with pytest.raises(ConfigError, match="sparse attention"):
        ampere.get_attn_backend_cls(Backend.CUSTOM, LATENTS._replace(use_sparse=True))


def test_other_engines_and_layers_are_left_to_vllm(ampere: Any) -> None:
    assert ampere.get_attn_backend_cls(Backend.TRITON_MLA, LATENTS) == Backend.TRITON_MLA.get_path()
    with pytest.raises(ValueError, match="not valid for this configuration"):
        ampere.get_attn_backend_cls(Backend.CPU_MLA, LATENTS._replace(use_mla=False))


def test_our_module_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="HypicNothing"):
        cuda_mla.HypicNothing  # noqa: B018


@pytest.mark.parametrize("stock", [TritonMLABackend, FlashMLABackend])
def test_our_implementation_stands_before_the_stock_one(stock: Any) -> None:
    ours: Any = getattr(cuda_mla, f"Hypic{stock.__name__}")
    order = ours.get_impl_cls().__mro__
    of_stock = order.index(stock.get_impl_cls())
    assert order.index(CUDALatentAttention) < order.index(LatentAttention) < of_stock
    assert ours.get_impl_cls().do_kv_cache_update is MLAAttentionImpl.do_kv_cache_update
    assert not ours.get_impl_cls().__abstractmethods__
    # Full CUDA graphs of mixed batches hold no rows of ours.
    builder = ours.get_builder_cls()
    assert issubclass(builder, stock.get_builder_cls())
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


def test_support_of_graphs_is_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = TritonMLABackend.get_builder_cls()
    for has in AttentionCGSupport:
        monkeypatch.setattr(stock, "_cudagraph_support", has)
        builder: Any = cuda_mla.backend_of.__wrapped__(Backend.TRITON_MLA).get_builder_cls()
        found = builder.get_cudagraph_support(None, None)
        assert found.value == min(has.value, AttentionCGSupport.UNIFORM_BATCH.value)


def test_what_is_overridden_and_read_is_vllms() -> None:
    for name, stock in (("forward_mha", mla.MLACommonBaseImpl), ("forward_mqa", mla.MLACommonImpl)):
        found, wanted = (
            list(inspect.signature(getattr(c, name)).parameters) for c in (CUDALatentAttention, stock)
        )
        assert [n.replace("kv_c_and_k_pe_cache", "kv_cache") for n in wanted] == found
    source = inspect.getsource(mla.MLAAttention.forward_impl)
    # Calls by position, many rows first, whose number says whether there is such a call.
    many, few = "self.impl.forward_mha(", "self.impl.forward_mqa(mqa_q, kv_cache, attn_"
    assert source.index(many) < source.index(few)
    assert "num_mqa_tokens = attn_metadata.num_decode_tokens" in source and "if num_mha_tokens > 0" in source
    assert "self._v_up_proj(attn_out, out=mqa_output_slice)" in source
    of_pass = {field.name for field in fields(mla.MLACommonMetadata)}
    assert {"slot_mapping", "num_actual_tokens", "num_decodes", "num_decode_tokens"} <= of_pass
    for kind in (mla.MLACommonPrefillMetadata, mla.MLACommonDecodeMetadata):
        assert "block_table" in {field.name for field in fields(kind)}
    # Between pieces of a compiled graph; what writes the cache is not, so nothing of ours is in there.
    assert "vllm::unified_mla_attention_with_output" in CompilationConfig._attention_ops
    assert "vllm::unified_mla_kv_cache_update" not in CompilationConfig._attention_ops


def test_what_operators_take_is_left_to_them() -> None:
    impl: Any = CUDALatentAttention.__new__(CUDALatentAttention)
    layer: Any = type("Layer", (), {"impl": impl})()
    assert scratch_bytes([layer, layer], 1000, torch.bfloat16) == cuda_mla.PARTIAL_BYTES
