"""What cannot take part is refused at start-up, naming the layer and the reason."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import MiniMaxText01LinearAttention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from vllm_hypic.backends import attach
from vllm_hypic.backends.attention.backend import HypicAttentionImpl
from vllm_hypic.backends.linear import own_layer
from vllm_hypic.backends.linear.gdn import delta_net
from vllm_hypic.backends.linear.gdn.cpu import HypicCPUGatedDeltaNet
from vllm_hypic.backends.linear.lightning import cpu as lightning
from vllm_hypic.backends.linear.lightning.cpu import HypicLightning
from vllm_hypic.backends.linear.lightning.rotation import rotating_exactly
from vllm_hypic.backends.linear.mamba1 import cpu
from vllm_hypic.backends.linear.mamba1.cpu import HypicMamba1
from vllm_hypic.backends.linear.retention import mixers
from vllm_hypic.backends.ops import extension, span_attention
from vllm_hypic.backends.ops.span_attention.eager import rotate
from vllm_hypic.backends.probe import Unsupported, _Call, _link
from vllm_hypic.backends.rope import RopeTap
from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.errors import ConfigError
from vllm_hypic.models import fla
from vllm_hypic.pool.geometry import LatentGeometry, PoolGeometry, pool_geometry
from vllm_hypic.pool.states import GatedRetentionGeometry
from vllm_hypic.pool.tensors import DevicePool

from .cases import cos_sin_table

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
GDN = MambaSpec(
    block_size=32,
    shapes=((3, 512), (4, 64, 128)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_type=Kind.GDN_ATTN,
)
CONV = replace(GDN, mamba_type=Kind.SHORT_CONV, shapes=((2, 64),), dtypes=(torch.bfloat16,))
LIGHTNING = replace(GDN, mamba_type=Kind.LINEAR, shapes=((4, 64, 64),), dtypes=(torch.bfloat16,))
MAMBA1 = replace(GDN, mamba_type=Kind.MAMBA1, shapes=((3, 64), (64, 16)), dtypes=(torch.bfloat16,) * 2)
MAMBA2 = replace(GDN, mamba_type=Kind.MAMBA2, shapes=((3, 640), (8, 64, 16)), dtypes=(torch.bfloat16,) * 2)


def usual_impl() -> HypicAttentionImpl:
    """An implementation that takes part."""
    impl = HypicAttentionImpl.__new__(HypicAttentionImpl)
    for name in ("sinks", "alibi_slopes", "kv_sharing_target_layer_name"):
        setattr(impl, name, None)
    impl.sliding_window, impl.logits_soft_cap = -1, 0
    impl.is_fp8_kv_cache, impl.kv_cache_dtype = False, "fp8"
    return impl


def geometry(
    *specs: KVCacheSpec, conv_dim_first: bool = False, draft_rows: int = 0, **options: Any
) -> PoolGeometry:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    config = HypicConfig.from_mapping({"pool_bytes": 1 << 24, "expected_segment_tokens": 64, **options})
    caches, rest = KVCacheConfig(8, [], groups), {"conv_dim_first": conv_dim_first, "draft_rows": draft_rows}
    return pool_geometry(caches, config, torch.bfloat16, **rest)


def test_supported_layers() -> None:
    found = geometry(FULL, GDN)
    (attention,), (linear,) = found.attention, found.linear
    assert (attention.layer, attention.kv_heads, attention.head_size) == ("layers.0", 2, 64)
    # vLLM labels the state [heads, V, K].
    assert (linear.heads, linear.key_dim, linear.value_dim) == (4, 128, 64)
    assert (linear.conv_rows, linear.conv_dim) == (3, 512)
    assert found.nbytes <= 1 << 24


@pytest.mark.parametrize("dim_first", [False, True])
def test_records_have_no_rows_for_drafts(dim_first: bool) -> None:
    """On GPUs vLLM's convolutions keep as many rows more as there may be drafts."""
    found, (rows, channels) = [], GDN.shapes[0]
    for drafts in (0, 2):
        conv = (channels, rows + drafts) if dim_first else (rows + drafts, channels)
        spec = replace(GDN, shapes=(conv, *GDN.shapes[1:]))
        found.append(geometry(spec, conv_dim_first=dim_first, draft_rows=drafts))
    assert found[0] == found[1] and found[0].linear[0].conv_rows == 3


F32, BF16 = torch.float32, torch.bfloat16
LINEAR_LAYERS: dict[str, tuple[tuple[KVCacheSpec, ...], dict[str, Any], str | None]] = {
    "short convolution": ((FULL, CONV), {"conv": ((2, 64), BF16)}, None),
    "mamba2": (
        (FULL, MAMBA2),
        {"state": ((8, 64, 16), F32), "conv": ((3, 640), BF16), "log_transition": ((8,), F32)},
        "8 heads of 64 x 16",
    ),
    "mamba1": (
        (MAMBA1,),
        {"state": ((64, 16), F32), "conv": ((3, 64), BF16), "elapsed": ((64,), F32)},
        "64 channels of 16",
    ),
    "lightning": (
        (LIGHTNING,),
        {"state": ((4, 64, 64), F32), "log_transition": ((4,), F32)},
        "4 heads of 64 x 64",
    ),
}


@pytest.mark.parametrize(("specs", "parts", "shape"), LINEAR_LAYERS.values(), ids=LINEAR_LAYERS)
def test_linear_layers_without_transition_blocks(
    specs: tuple[KVCacheSpec, ...], parts: dict[str, Any], shape: str | None
) -> None:
    """States are kept in float32 whatever vLLM keeps them in; a transition is a number a head or channel."""
    found = geometry(*specs)
    (linear,) = found.linear
    assert {part.name: (part.shape, part.dtype) for part in linear.parts} == parts
    assert [part.name for part in linear.parts] == [*parts]
    assert shape is None or linear.shape == shape
    assert found.slot_bytes == sum(math.prod(sizes) * dtype.itemsize for sizes, dtype in parts.values())
    assert (found.record_transition_blocks, found.transition_blocks) == (0, 0)
    assert bool(found.pages) == bool(found.attention) == (FULL in specs)
    assert found.slots and found.nbytes <= 1 << 24


def test_latents_are_one_row_a_token() -> None:
    found = geometry(MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1, "head_size": 576}))
    (latent,) = found.attention
    assert isinstance(latent, LatentGeometry)
    assert latent.token_bytes == 576 * latent.dtype.itemsize
    public = DevicePool(found, torch.device("cpu")).kv["layers.0"]
    assert public.value is public.key and [*public.parts] == [*latent.parts] == ["k"]


@pytest.mark.parametrize(
    ("kind", "architecture", "name"),
    [
        (delta_net.CPUDeltaNetMixer, "DeltaNetForCausalLM", "the delta net"),
        (mixers.RetentionMixer, "RetNetForCausalLM", "retention"),
        (mixers.GatedLinearMixer, "GLAForCausalLM", "gated linear attention"),
    ],
)
def test_models_of_ours_are_refused_on_gpus_by_name(
    kind: type[Any], architecture: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = stock_layer(kind)
    assert attach.layer_refusal(layer, architecture) is None
    monkeypatch.setattr(own_layer.current_platform, "is_cpu", lambda: False)
    refusal = f"{name} on this platform (served: CPU)"
    assert attach.layer_refusal(layer, architecture) == refusal
    # A stock engine asks nobody, but loads.
    model = stock_layer(getattr(fla, architecture), attn=layer)
    with pytest.raises(ValueError, match=re.escape(f"{architecture}: {refusal}")):
        model.load_weights([])


def test_lightning_attention_and_mamba1_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; and lightning attention where rotations are not known to compose."""
    common: dict[str, Any] = {"head_size": 64, "rotary_dim": 32, "max_position_embeddings": 100, "base": 1e4}
    common |= {"is_neox_style": True, "dtype": torch.bfloat16}
    with set_current_vllm_config(VllmConfig()):
        plain, yarn = RotaryEmbedding(**common), YaRNScalingRotaryEmbedding(**common, scaling_factor=4.0)
        scaled = LinearScalingRotaryEmbedding(**common, scaling_factors=2.0)
    for rope, positions, length in ((plain, 100, 1.0), (yarn, 400, yarn.mscale)):
        stock, exact = rope.cos_sin_cache, rotating_exactly(rope)
        assert exact is not None and rotating_exactly(rope) is exact, "layers that share the module share it"
        assert rope.cos_sin_cache is stock and exact._forward_method.__self__ is exact
        table = exact.hypic_rotations
        assert table.shape == (positions, 32) and table.dtype == torch.float32
        cos, sin = table.double().chunk(2, 1)
        torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
        torch.testing.assert_close(cos[90], cos[60] * cos[30] - sin[60] * sin[30], rtol=0, atol=2e-7)
        torch.testing.assert_close(exact.cos_sin_cache, length * table)
        assert float((exact.cos_sin_cache - rope._compute_cos_sin_cache()).abs().max()) < 1e-4
    layer = stock_layer(HypicLightning, linear_rope=True, _table=table, rotary_emb=exact)
    for name in ("BailingMoeV2_5ForCausalLM", "BailingMoeLinearV2ForCausalLM"):
        assert attach.layer_refusal(layer, name) is None
    assert rotating_exactly(scaled) is None
    layer._table, layer.rotary_emb = None, scaled
    says = attach.layer_refusal(layer, name)
    assert says is not None and says.startswith("lightning attention rotated by LinearScalingRotaryEmbedding")
    mamba = stock_layer(HypicMamba1)
    assert attach.layer_refusal(mamba, "JambaForCausalLM") is None
    for module in (lightning, cpu):
        monkeypatch.setattr(module.current_platform, "is_cuda", lambda: True)
    assert attach.layer_refusal(layer, name) == "lightning attention on GPUs (served on CPUs)"
    assert attach.layer_refusal(mamba, "JambaForCausalLM") == "Mamba1 on GPUs (served on CPUs)"


def test_gated_linear_attention_has_a_number_a_channel_for_a_transition() -> None:
    found = GatedRetentionGeometry.of("layers.0", [(4, 32, 64)], [F32], False)
    parts = [(part.name, part.shape, part.dtype) for part in found.parts]
    assert parts == [("state", (4, 32, 64), F32), ("log_transition", (4, 32), F32)]
    assert found.shape == "4 heads of 32 x 64" and found.blocks == 0


def test_interiors_must_be_as_long_as_a_convolution_reaches() -> None:
    """Else its state holds inputs of rows before the segment, which no record has."""
    assert geometry(LIGHTNING).linear[0].least_tokens == 1
    assert geometry(CONV, min_segment_tokens=2).slots and geometry(GDN, min_segment_tokens=1).slots
    with pytest.raises(ConfigError, match="min_segment_tokens=1: expected at least 2"):
        geometry(CONV, min_segment_tokens=1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=256), "local attention in chunks of 256"),
        (FullAttentionSpec(**SHAPE, attention_chunk_size=256), "local attention in chunks of 256 tokens"),
        (FullAttentionSpec(**SHAPE, head_size_v=128), "V of head size 128 beside K of 64"),
        (
            MLAAttentionSpec(**SHAPE, state_content_bytes=656, cache_dtype_str="fp8_ds_mla"),
            "MLA with a packed",
        ),
        (MLAAttentionSpec(**SHAPE, model_version="deepseek_v4"), "MLA of 1 tokens a row"),
        (MLAAttentionSpec(**SHAPE, non_causal_multi_token_decode=True), "MLA with attention to later tokens"),
        (replace(GDN, mamba_type=Kind.MAMBA1), "linear attention with states of shapes"),
        (replace(GDN, mamba_type=Kind.LINEAR), "linear attention with states of shapes"),
        (replace(GDN, mamba_type=SimpleNamespace(name="OTHER")), "linear attention of kind OTHER"),
        (replace(GDN, shapes=((3, 512), (4, 64))), "linear attention with states of shapes"),
        (replace(MAMBA2, shapes=(*MAMBA2.shapes, (8, 16))), "linear attention with states of shapes"),
        (replace(CONV, shapes=((2, 64), (4, 64, 64))), "linear attention with states of shapes"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_caches(spec: KVCacheSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hypic: layer layers.1: {says}.* is not supported"):
        geometry(FULL, spec)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sliding_window", 64, None),
        ("logits_soft_cap", 30.0, "logits soft-cap 30.0"),
        ("sinks", torch.zeros(4), None),
        ("alibi_slopes", torch.ones(4), "ALiBi"),
        ("kv_sharing_target_layer_name", "layers.3", "KV shared with layer layers.3"),
        ("is_fp8_kv_cache", True, "quantised KV cache (fp8)"),
    ],
)
def test_attention_layers(field: str, value: object, says: str | None) -> None:
    impl = usual_impl()
    assert impl.refusal(None) is None
    setattr(impl, field, value)
    if field in ("logits_soft_cap", "kv_sharing_target_layer_name", "is_fp8_kv_cache"):  # served on CPU
        assert impl.refusal(None) is None
        impl.serves_soft_caps = impl.serves_shared_kv = impl.serves_quantised_cache = False
    assert impl.refusal(None) == says


def stock_layer(kind: type[Any], **fields: Any) -> Any:
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in fields.items():
        setattr(layer, name, value)
    return layer


def test_a_layer_that_has_no_cache_of_its_own_is_not_passed_over() -> None:
    """It would run stock, and see nothing of the records."""
    impl = usual_impl()
    impl.alibi_slopes, impl.kv_sharing_target_layer_name = torch.ones(4), "layers.0"
    layer = stock_layer(Attention, impl=impl)
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layers.1": layer}),
        model_config=SimpleNamespace(architecture="Gemma3nForCausalLM"),
    )
    with pytest.raises(Unsupported, match=r"^hypic: layer layers.1: ALiBi is not"):
        attach.attach(runner, geometry(FULL), NotImplemented)


def test_a_backend_that_the_model_chooses_is_named() -> None:
    layer = stock_layer(Attention, impl=object(), attn_backend=SimpleNamespace(get_name=lambda: "OTHER"))
    assert attach.layer_refusal(layer, "") == "Attention by OTHER (the model itself chooses this backend)"
    assert attach.layer_refusal(stock_layer(Attention), "") == "Attention without the hypic backend"


@pytest.mark.parametrize(
    "kind", [HypicCPUGatedDeltaNet, MiniMaxText01LinearAttention, Glm5NextLinearAttention]
)
def test_linear_layers_of_models_that_were_never_served(kind: type[Any]) -> None:
    """Qwen4Exp has the very layer that is replaced by ours, and convolutions over n-grams beside it; GLM-5.3
    has Kimi delta attention in a class of its own."""
    says = attach.layer_refusal(stock_layer(kind), "Qwen4ExpForCausalLM")
    if kind is not HypicCPUGatedDeltaNet:
        supported = (
            "QwenGatedDeltaNetAttention, OlmoHybridGatedDeltaNetAttention, KimiGatedDeltaNetAttention, "
            "BailingMoeV3KimiDeltaAttention, ShortConv, MambaMixer2, MambaMixer, BailingMoELinearAttention"
        )
        assert says == f"linear attention {kind.__name__} (supported: {supported})"
    else:
        assert says.startswith("gated delta net in Qwen4ExpForCausalLM (the model may keep other states; ")
        assert "Qwen3NextForCausalLM" in says


def test_layers_that_the_kernels_refuse_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are served all the same, slower."""
    told: list[str] = []
    logger = init_logger("vllm.hypic.test_refusals")
    monkeypatch.setattr(logger, "warning", lambda message, *args, **_: told.append(message % args))
    monkeypatch.setattr(attach, "logger", logger)
    for head_size in (64, 72, 72, 64):
        attach._warn_of_refusal("full attention", span_attention.refuses(head_size, "cpu"))
    assert told == [
        "hypic: full attention runs in PyTorch, several times slower: "
        "head size 72 (expected a multiple of 16)"
    ]
    # That there are no kernels at all is said elsewhere, for all layers.
    monkeypatch.setattr(extension, "missing", lambda: "not built")
    attach._warn_of_refusal("gated delta net", "not built")
    assert len(told) == 1


# -- linking a layer to its rope ---------------------------------------------------------------------

POSITIONS, TABLE = torch.tensor([0, 3, 70, 999]), cos_sin_table(16)


class FakeRope(RopeTap):
    def __init__(self, table: torch.Tensor | None, *, neox: bool = True) -> None:
        self.is_neox_style = neox
        if table is not None:
            self.cos_sin_cache = table


class Calls:
    """A layer's three probe calls, right until a test breaks them.

    ``noise``: what comes before a rope differs by so much from run to run, as atomics make it; K is about 3.
    """

    def __init__(self, rotation: torch.Tensor = TABLE, noise: float = 0.0, *, rotated: bool = True) -> None:
        gen = torch.Generator().manual_seed(0)
        self.rope = FakeRope(rotation)
        self.raw = torch.randn(4, 2, 32, generator=gen)

        def run(positions: torch.Tensor) -> _Call:
            raw = self.raw + noise * (torch.rand(self.raw.shape, generator=gen) - 0.5)
            if not rotated:
                return _Call(raw.flatten(1), None, None, None)
            key = rotate(raw, rotation[positions], True)
            return _Call(key, self.rope, raw.flatten(1), key.flatten(1))

        nowhere = torch.zeros_like(POSITIONS)
        self.zero, self.again, self.moved = run(nowhere), run(nowhere), run(POSITIONS)

    def link(self) -> RopeTap | None:
        return _link("layers.7", self.zero, self.again, self.moved, POSITIONS)

    def refused(self, says: str) -> None:
        with pytest.raises(Unsupported, match=rf"^hypic: layer layers.7:? {says}"):
            self.link()


@pytest.mark.parametrize("scale", [1.0, 1.14])
def test_linked(scale: float) -> None:
    calls = Calls(scale * TABLE)
    assert calls.link() is calls.rope


def test_nope_even_if_a_rope_ran() -> None:
    """Models may rotate something else than this layer's K."""
    calls = Calls()
    calls.zero = calls.again = calls.moved = replace(calls.moved, key=calls.raw)
    assert calls.link() is None


def test_noise_between_equal_runs_is_no_dependence_on_positions() -> None:
    calls = Calls(noise=5e-5)
    assert calls.link() is calls.rope
    assert Calls(noise=5e-5, rotated=False).link() is None
    # What is more than that noise still shows.
    calls.moved = replace(calls.moved, raw=calls.moved.raw + 1e-3)
    calls.refused("K depends on positions before FakeRope")


def test_calls_that_show_nothing_are_refused() -> None:
    Calls(noise=0.1).refused("K of two equal runs differs by .*, too much to detect a rotary embedding")
    with pytest.raises(Unsupported, match=r"did not reach layer layers.7"):
        _link("layers.7", None, None, None, POSITIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda call: {"rope": None, "raw": None, "rotated": None}, "rotates K by a rotary embedding that"),
        (lambda call: {"key": 2 * call.key}, "changes K after FakeRope"),
        (lambda call: {"raw": call.raw + 1}, "K depends on positions before FakeRope"),
        # FoPE has a table per head, or of twice the head size.
        *(
            (lambda call, odd=odd: {"rope": FakeRope(odd)}, "FakeRope has no table of one angle per pair")
            for odd in (None, torch.zeros(1000, 2, 16), torch.zeros(1000, 64))
        ),
        *(
            (lambda call, other=other: {"rope": other}, "FakeRope is not the plain rotation of its table")
            for other in (
                FakeRope(TABLE.roll(1, 0)),
                FakeRope(1.14 * TABLE),
                FakeRope(TABLE[:, [*range(8, 16), *range(8)]]),
                FakeRope(TABLE, neox=False),
            )
        ),
    ],
)
def test_calls_of_no_known_rope(change: Callable[[_Call], dict[str, Any]], says: str) -> None:
    calls = Calls()
    calls.moved = replace(calls.moved, **change(calls.moved))
    calls.refused(says)


def test_rotation_that_loses_k() -> None:
    """A table that is zero somewhere rotates as it says, but K is gone."""
    flat = TABLE.clone()
    flat[:, [3, 11]] = 0  # cos and sin of one pair
    Calls(flat).refused("the rotation by FakeRope cannot be undone")
