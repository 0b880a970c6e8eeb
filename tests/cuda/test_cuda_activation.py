"""Start-up on a pretended CUDA platform: a complete configuration, or a refusal with the reason.

The configuration is a real one, made by vLLM on this machine; only what the platform says of itself is
pretended.
"""

import copy
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_hypic.backends import cuda_support as support
from vllm_hypic.backends.attention.cuda import HypicCUDAAttentionBackend
from vllm_hypic.config.drafting import refusal as refusal_of_drafts
from vllm_hypic.engine import activation
from vllm_hypic.engine.activation import CUDA_WORKER, SCHEDULER, choose, complete
from vllm_hypic.engine.tokenizer import TOKENS_ENV
from vllm_hypic.errors import ConfigError

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-hybrid-qa" / "model"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
Patch = pytest.MonkeyPatch


class CUDA:
    """What the plugin asks of vLLM's platform; for all else it is this machine's."""

    device_name = device_type = "cuda"
    capability = 90

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: object, attn_selector_config: object, num_heads: int | None = None
    ) -> str:
        raise AssertionError("no layer is made here")

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def has_device_capability(self, wanted: int) -> bool:
        return self.capability >= wanted

    def get_device_capability(self) -> Any:
        return SimpleNamespace(as_version_str=lambda: f"{self.capability // 10}.{self.capability % 10}")


@pytest.fixture(scope="module")
def made() -> VllmConfig:
    """Of this machine's platform, before any pretending."""
    args = EngineArgs(model=str(MODEL), attention_backend="hypic", enforce_eager=True)
    return args.create_engine_config()


@pytest.fixture
def cuda(monkeypatch: Patch) -> CUDA:
    platform = CUDA(vllm.platforms.current_platform)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    # Set first, so that what the code under test sets is undone, too.
    for name in (RUNNER, TOKENS_ENV):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return platform


@pytest.fixture
def config(made: VllmConfig) -> VllmConfig:
    """A copy that a test may change."""
    changed = copy.copy(made)
    for part in ("model_config", "cache_config", "parallel_config", "scheduler_config", "kv_transfer_config"):
        setattr(changed, part, copy.copy(getattr(made, part)))
    changed.model_config.dtype = torch.bfloat16
    return changed


def arguments(**options: Any) -> EngineArgs:
    return EngineArgs(model=str(MODEL), attention_backend="hypic", **options)


def test_the_backend_alone_chooses_everything(cuda: CUDA) -> None:
    args = arguments()
    assert choose(args)
    assert (args.worker_cls, args.scheduler_cls) == (CUDA_WORKER, SCHEDULER)
    assert args.kv_transfer_config is not None and args.kv_transfer_config.kv_connector == "HypicConnector"
    # In the environment, so that the engine's processes have it, too.
    assert os.environ[RUNNER] == "0"


def test_the_backends_name_stands_for_flash_attention(cuda: CUDA) -> None:
    """The module where vLLM looks the class up, imported anew under another name."""
    here = importlib.util.find_spec("vllm_hypic.backends.attention.backend")
    name = "vllm_hypic.backends.attention.backend_on_cuda"
    anew = importlib.util.spec_from_file_location(name, here.origin)
    module = importlib.util.module_from_spec(anew)
    anew.loader.exec_module(module)
    assert module.HypicAttentionBackend is HypicCUDAAttentionBackend
    path = ".".join(HypicCUDAAttentionBackend.full_cls_name())
    assert resolve_obj_by_qualname(path) is HypicCUDAAttentionBackend


@pytest.mark.parametrize("given", ["0", "1"])
def test_the_users_choice_of_the_model_runner_stays(cuda: CUDA, monkeypatch: Patch, given: str) -> None:
    monkeypatch.setenv(RUNNER, given)
    assert choose(arguments())
    assert os.environ[RUNNER] == given


def test_engines_of_others_are_left_alone(cuda: CUDA) -> None:
    args = EngineArgs(model=str(MODEL))
    assert not choose(args) and args.worker_cls == "auto" and RUNNER not in os.environ


def test_other_workers_and_platforms_are_refused(cuda: CUDA, monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match=r"needs --worker-cls vllm_hypic\.engine\.cuda_worker"):
        choose(arguments(worker_cls="vllm.v1.worker.gpu_worker.Worker"))
    monkeypatch.setattr(cuda, "is_cuda", lambda: False)
    monkeypatch.setattr(cuda, "device_name", "rocm")
    with pytest.raises(ConfigError, match="expected the CPU or the CUDA platform, got 'rocm'"):
        choose(arguments())


def test_stages_are_not_scheduled_ahead(config: VllmConfig) -> None:
    """vLLM refuses it of its V1 runner, and leaves it out where it is not asked for."""
    object.__setattr__(config.parallel_config, "pipeline_parallel_size", 2)
    config._validate_v1_model_runner()
    object.__setattr__(config.scheduler_config, "async_scheduling", True)
    with pytest.raises(ValueError, match="pipeline parallelism with async scheduling"):
        config._validate_v1_model_runner()


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("external_launcher", "gives every rank a scheduler of its own"),
        ("ray", "pipeline_parallel_size=2 with --distributed-executor-backend ray is not tested; use mp"),
    ],
)
def test_launchers_that_do_not_fit_are_refused(
    cuda: CUDA, config: VllmConfig, backend: str, says: str
) -> None:
    parts = {"pipeline_parallel_size": 2, "world_size": 2, "distributed_executor_backend": backend}
    change(config, **{f"parallel_config.{name}": value for name, value in parts.items()})
    with pytest.raises(ConfigError, match=says):
        complete(config)


REFUSED = [
    ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size=2: expected 1"),
    ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size=2: expected 1"),
    ("parallel_config.enable_dbo", True, "micro-batches"),
    ("parallel_config.ubatch_size", 2, "micro-batches"),
    ("model_config.dtype", torch.float32, "dtype=torch.float32: expected bfloat16 or float16"),
    ("model_config.enable_sleep_mode", True, "--enable-sleep-mode"),
    (
        "cache_config.cache_dtype",
        "fp8_e5m2",
        "kv_cache_dtype=fp8_e5m2: expected auto, bfloat16, float16, fp8 or fp8_e4m3",
    ),
    ("cache_config.cache_dtype", "fp8_per_token_head", "kv_cache_dtype=fp8_per_token_head: expected auto"),
    ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    ("cache_config.use_replayssm", True, "replayed SSM states"),
    ("additional_config", {"gdn_prefill_backend": "cutedsl"}, "gdn_prefill_backend='cutedsl'"),
    (
        "speculative_config",
        SimpleNamespace(method="medusa"),
        "speculative decoding by 'medusa' is not tested with records on CUDA: "
        "expected one of ngram, suffix, draft_model, eagle, eagle3, mtp",
    ),
    (
        "speculative_config",
        SimpleNamespace(method="eagle"),
        "speculative decoding by 'eagle' of Qwen3_5ForCausalLM is not supported on CUDA: mtp is tested "
        "with linear layers, other methods with full attention only; expected one of ngram, suffix",
    ),
    (
        "kv_transfer_config.kv_connector_extra_config",
        {"state_dtype": "float16"},
        "state_dtype=float16: expected float32",
    ),
    ("VLLM_ENABLE_STARTUP_PLAN", "1", "VLLM_ENABLE_STARTUP_PLAN=1"),
    ("VLLM_USE_BREAKABLE_CUDAGRAPH", "1", "VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
    (RUNNER, "1", "set VLLM_USE_V2_MODEL_RUNNER=0"),
    ("model.is_encoder_decoder", True, "encoder-decoder"),
    ("model.is_mm_prefix_lm", True, "bidirectional attention"),
    ("model.rswa_window", 64, "reference sliding window of 64 tokens"),
]
SERVED: list[dict[str, object]] = [
    {},
    {"parallel_config.pipeline_parallel_size": 2, "parallel_config.data_parallel_size": 2},
    {"model.use_mla": True},
    {"model.architecture": "NemotronHForCausalLM"},
    {"model.architecture": "Lfm2ForCausalLM"},
    # Records may leave the device.
    {
        "kv_transfer_config.kv_connector_extra_config": {
            "store": {"tiers": [{"type": "memory", "bytes": 1 << 20}]},
            "segment_parallel": {"listen": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101"},
        }
    },
]


def change(config: VllmConfig, **values: object) -> None:
    """What vLLM derives from a model, ``model.``, cannot be set: a model that says so stands in."""
    for name, value in values.items():
        *parts, field = name.split(".")
        if parts == ["model"]:
            said = {one: getattr(config.model_config, one) for one in DERIVED}
            assert field in said
            config.model_config = SimpleNamespace(**{**said, field: value})  # type: ignore[assignment]
            continue
        place: Any = config
        for part in parts:
            place = getattr(place, part)
        assert hasattr(place, field), f"vLLM has no {name}: the check could never fail"
        object.__setattr__(place, field, value)


DERIVED = (
    *("use_mla", "is_encoder_decoder", "is_mm_prefix_lm", "rswa_window", "dtype", "enable_sleep_mode"),
    *("multimodal_config", "architecture", "hf_text_config"),
)


@pytest.mark.parametrize(("name", "value", "says"), REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason(
    cuda: CUDA, config: VllmConfig, monkeypatch: Patch, name: str, value: Any, says: str
) -> None:
    if name.isupper():
        monkeypatch.setenv(name, value)
    else:
        change(config, **{name: value})
    if name.startswith("model."):
        assert says in (support.refusal(config) or "")
        return
    prefix = "" if name == RUNNER else "--attention-backend hypic: "
    with pytest.raises(ConfigError, match=f"^{prefix}") as refused:
        complete(config)
    assert says in str(refused.value)


@pytest.mark.parametrize("values", SERVED, ids=lambda values: ", ".join(values) or "plain")
def test_what_is_supported_is_served(cuda: CUDA, config: VllmConfig, values: dict[str, Any]) -> None:
    change(config, **values)
    assert support.refusal(config) is None
    if not any(name.startswith("model.") for name in values):
        complete(config)


def test_replicas_of_experts_are_refused(cuda: CUDA, config: VllmConfig, monkeypatch: Patch) -> None:
    change(config, **{"parallel_config.data_parallel_size": 2})
    monkeypatch.setattr(type(config.model_config), "is_moe", True)
    assert "data_parallel_size=2 with experts: expected 1" in (support.refusal(config) or "")


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_fp8_is_served_where_flash_attention_reads_it(
    cuda: CUDA, config: VllmConfig, monkeypatch: Patch, dtype: str
) -> None:
    object.__setattr__(config.cache_config, "cache_dtype", dtype)
    assert support.refusal(config) is None
    for capability, version in ((80, "8.0"), (89, "8.9"), (100, "10.0"), (120, "12.0")):
        monkeypatch.setattr(CUDA, "capability", capability)
        assert support.refusal(config) == (
            f"kv_cache_dtype={dtype} on compute capability {version}: expected auto, bfloat16 or float16, as "
            "only FlashAttention 3 reads FP8, which needs compute capability 9.0"
        )
    monkeypatch.undo()
    monkeypatch.setattr(vllm.platforms, "_current_platform", cuda)
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    assert support.refusal(config) == (
        f"kv_cache_dtype={dtype} of latent attention: expected auto, bfloat16 or float16"
    )


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("latents", [False, True], ids=["", "latents"])
def test_drafts_that_are_looked_up_are_served(
    cuda: CUDA, config: VllmConfig, monkeypatch: Patch, method: str, latents: bool
) -> None:
    """Of latent attention, too, which vLLM's CPU kernels alone get wrong."""
    monkeypatch.setattr(type(config.model_config), "use_mla", latents)
    speculative = SimpleNamespace(method=method, attention_backend=None, num_speculative_tokens=3)
    object.__setattr__(config, "speculative_config", speculative)
    complete(config)
    reason = refusal_of_drafts(config, keeps_states=True)
    assert (reason is None) != latents and (not latents or "wrong answers on CPUs" in (reason or ""))


def test_a_models_own_head_drafts_beside_linear_layers(
    cuda: CUDA, config: VllmConfig, monkeypatch: Patch
) -> None:
    object.__setattr__(config, "speculative_config", SimpleNamespace(method="mtp"))
    object.__setattr__(config.scheduler_config, "async_scheduling", False)
    assert config.model_config.is_hybrid and support.refusal(config) is None
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    assert "speculative decoding by 'mtp'" in (support.refusal(config) or "")


def test_where_drafts_of_a_model_were_accepted_the_host_knows(
    cuda: CUDA, config: VllmConfig, monkeypatch: Patch
) -> None:
    """vLLM would schedule ahead of what was accepted."""
    drafting = arguments(speculative_config={"method": "eagle", "model": "other"})
    plain, own = arguments(), arguments(speculative_config={"method": "ngram"}, async_scheduling=True)
    assert choose(drafting) and choose(plain) and choose(own)
    assert drafting.async_scheduling is False and plain.async_scheduling is None
    assert own.async_scheduling is True  # whoever says so is told
    monkeypatch.setattr(type(config.model_config), "is_hybrid", False)
    object.__setattr__(config, "speculative_config", SimpleNamespace(method="eagle"))
    for ahead in (False, True):
        object.__setattr__(config.scheduler_config, "async_scheduling", ahead)
        reason = support.refusal(config)
        assert (reason is None) != ahead and (not ahead or "--async-scheduling is not" in (reason or ""))


def test_expandable_segments_are_refused_by_vllm(monkeypatch: Patch) -> None:
    """Beside any connector, ours among them; the sentence is vLLM's and says what to do."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match=r"(?s)HypicConnector is incompatible.*unset expandable_segments"):
        arguments(enforce_eager=True).create_engine_config()


def test_old_devices_are_refused(cuda: CUDA, config: VllmConfig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cuda, "capability", 75)
    assert support.refusal(config) == "compute capability 7.5: expected 8.0 or newer"


def test_on_the_cpu_nothing_of_this_is_asked(config: VllmConfig, monkeypatch: Patch) -> None:
    config.model_config.enable_sleep_mode = True
    asked: list[object] = []
    monkeypatch.setattr(support, "refusal", lambda *args: asked.append(args))
    activation._refuse_on_cuda(config)
    assert not asked
