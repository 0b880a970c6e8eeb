"""Which backend serves latent attention on CUDA: vLLM's platform chooses; ours is made of that one."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBaseImpl,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
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
from vllm_hypic.backends.cuda_support import scratch_bytes
from vllm_hypic.errors import ConfigError
from vllm_hypic.patches import backend_name, cuda_backend_choice

LATENTS = AttentionSelectorConfig(576, torch.bfloat16, "auto", None, use_mla=True)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's CUDA platform of a GPU of compute capability 8.0, without its library, and with the patch."""
    name = "vllm._C_stable_libtorch"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    backend_name.apply()
    stock = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase

    class Ampere(stock):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(8, 0)

    cuda_backend_choice.apply_to(Ampere)
    cuda_backend_choice.apply_to(Ampere)
    assert "_hypic" not in vars(stock.get_attn_backend_cls.__func__)
    yield Ampere
    sys.modules.pop("vllm.platforms.cuda")


def test_ours_is_made_of_vllms_choice(platform: Any) -> None:
    """FlashAttention's and FlashMLA's are for newer GPUs."""
    assert platform.get_attn_backend_cls(None, LATENTS) == Backend.TRITON_MLA.get_path()
    ours = resolve_obj_by_qualname(platform.get_attn_backend_cls(Backend["HYPIC"], LATENTS, num_heads=16))
    assert ours.__name__ == "HypicTritonMLABackend" and issubclass(ours, TritonMLABackend)
    assert resolve_obj_by_qualname(".".join(ours.full_cls_name())) is ours
    # What vLLM decides by the name, it decides as it would.
    assert ours.get_name() == "TRITON_MLA"


@pytest.mark.parametrize("name", cuda_backend_choice.SERVED)
def test_each_choice_has_a_class(platform: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made: list[Backend] = []
    monkeypatch.setattr(cuda_mla, "backend_of", lambda backend: made.append(backend))
    monkeypatch.setattr(platform, "get_valid_backends", classmethod(lambda cls, **_: ([candidate(name)], {})))
    resolve_obj_by_qualname(platform.get_attn_backend_cls(Backend.CUSTOM, LATENTS))
    assert made == [Backend[name]]


def candidate(name: str) -> Any:
    """What vLLM chooses among, of a backend that cannot be imported here."""
    module, _, qualname = Backend[name].get_path().rpartition(".")
    cls = type(qualname, (), {"full_cls_name": classmethod(lambda cls: (module, qualname))})
    return importlib.import_module("vllm.platforms.cuda")._BackendCandidate(cls, Backend[name], 0)


def test_other_choices_are_refused_by_name(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = [candidate("TOKENSPEED_MLA")]
    monkeypatch.setattr(platform, "get_valid_backends", classmethod(lambda cls, **_: (other, {})))
    with pytest.raises(ConfigError, match=r"latent attention by TokenspeedMLABackend, .* FLASH_ATTN_MLA, "):
        platform.get_attn_backend_cls(Backend.CUSTOM, LATENTS)


def test_sparse_attention_is_refused(platform: Any) -> None:
    with pytest.raises(ConfigError, match="sparse attention"):
        platform.get_attn_backend_cls(Backend.CUSTOM, LATENTS._replace(use_sparse=True))


def test_other_engines_and_layers_are_left_to_vllm(platform: Any) -> None:
    assert platform.get_attn_backend_cls(Backend.TRITON_MLA, LATENTS) == Backend.TRITON_MLA.get_path()
    with pytest.raises(ValueError, match="not valid for this configuration"):
        platform.get_attn_backend_cls(Backend.CPU_MLA, LATENTS._replace(use_mla=False))


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
    for name, stock in (("forward_mha", MLACommonBaseImpl), ("forward_mqa", MLACommonImpl)):
        found, wanted = (
            list(inspect.signature(getattr(c, name)).parameters) for c in (CUDALatentAttention, stock)
        )
        assert [n.replace("kv_c_and_k_pe_cache", "kv_cache") for n in wanted] == found
    source = inspect.getsource(MLAAttention.forward_impl)
    # Calls by position, many rows first, whose number says whether there is such a call.
    assert source.index("self.impl.forward_mha(") < source.index(
        "self.impl.forward_mqa(mqa_q, kv_cache, attn_"
    )
    assert "num_mqa_tokens = attn_metadata.num_decode_tokens" in source and "if num_mha_tokens > 0" in source
    assert "self._v_up_proj(attn_out, out=mqa_output_slice)" in source
    of_pass = {field.name for field in fields(MLACommonMetadata)}
    assert {"slot_mapping", "num_actual_tokens", "num_decodes", "num_decode_tokens"} <= of_pass
    for kind in (MLACommonPrefillMetadata, MLACommonDecodeMetadata):
        assert "block_table" in {field.name for field in fields(kind)}
    # Between pieces of a compiled graph; what writes the cache is not, so nothing of ours is in there.
    assert "vllm::unified_mla_attention_with_output" in CompilationConfig._attention_ops
    assert "vllm::unified_mla_kv_cache_update" not in CompilationConfig._attention_ops


def test_what_operators_take_is_left_to_them() -> None:
    impl: Any = CUDALatentAttention.__new__(CUDALatentAttention)
    layer: Any = type("Layer", (), {"impl": impl})()
    assert scratch_bytes([layer, layer], 1000, torch.bfloat16) == cuda_mla.PARTIAL_BYTES
