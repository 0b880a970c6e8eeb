"""What serves each example on each generation of GPUs: vLLM's own choice, on pretended platforms."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_hypic.backends.cuda_support import FLASHINFER_HEADS
from vllm_hypic.engine.activation import complete
from vllm_hypic.errors import ConfigError
from vllm_hypic.patches import backend_name, cuda_backend_choice

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
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
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
    assert isinstance(made.additional_config, dict)
    config.additional_config = {**made.additional_config, **options}
    return config


def prefill_of(config: VllmConfig) -> str:
    """What vLLM prefills gated delta nets with."""
    return qwen_gdn_linear_attn._resolve_gdn_prefill_backend(config)[1]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_has_its_backends(
    made: dict[str, VllmConfig], platform: Callable[[str], Any], name: str, gpu: str
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
    made: dict[str, VllmConfig],
    platform: Callable[[str], Any],
    heads: tuple[int, int],
    gpu: str,
    backend: str,
) -> None:
    platform(gpu)
    config = config_of(made[EXAMPLES[0]], heads)
    left_alone = prefill_of(config)
    complete(config)
    assert prefill_of(config) == backend
    if heads[0] == 128 or gpu == "H100":
        assert left_alone == ("triton" if gpu == "A100" else "flashinfer")


def test_what_it_is_not_made_for_is_refused_where_it_is_asked_for(
    made: dict[str, VllmConfig], platform: Callable[[str], Any]
) -> None:
    platform("H100")
    config = config_of(made[EXAMPLES[0]], None, gdn_prefill_backend="FlashInfer")
    with pytest.raises(ConfigError, match=r"'flashinfer' with linear heads of 64 and 64: .* use 'triton'"):
        complete(config)
    complete(config_of(made[EXAMPLES[0]], (128, 128), gdn_prefill_backend="flashinfer"))
    complete(config_of(made[EXAMPLES[0]], None, gdn_prefill_backend="triton"))
