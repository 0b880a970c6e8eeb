"""The linear-attention families whose layers take part in PIC: one table, which all parts of an engine read.

To add a family: a folder beside ``backends/linear/gdn`` that holds the layer class (see
``backends/linear/base.py``) and has a function ``register``; and a row here.  Scheduler and workers size the
pool by the rows, so these name the folders and do not import them.  Another kind of transition is a class in
``states.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .states import (
    ConvGeometry,
    DecayGeometry,
    DiagonalGeometry,
    GatedRetentionGeometry,
    LinearGeometry,
    RetentionGeometry,
    StateGeometry,
)


@dataclass(frozen=True)
class LinearFamily:
    """A family as vLLM knows it, and where its layers are.

    ``name``: as messages call it; ``mamba_type``: its name in vLLM's ``MambaAttentionBackendEnum``;
    ``geometry``: what records hold of a layer; ``stock``: vLLM's layer classes; ``module``: where
    ``register`` replaces these by ours; ``architectures``: model classes, vLLM's or ours, that keep
    nothing of a prompt but KV and the states of these layers, models that see among them, for prompts of
    text.  Others may use the very class and keep more beside it that nobody composes, so they are refused
    (:data:`NOT_SERVED`: by name, with what that is).  No class is in two rows: a
    model's layers are of one family.  ``drafts``: requests may decode with drafts, on CPU.
    """

    name: str
    mamba_type: str
    geometry: type[StateGeometry]
    stock: tuple[str, ...]
    module: str
    architectures: frozenset[str]
    drafts: bool = False


GATED_DELTA_NET = LinearFamily(
    name="gated delta net",
    mamba_type="GDN_ATTN",
    geometry=LinearGeometry,
    stock=(
        *("QwenGatedDeltaNetAttention", "OlmoHybridGatedDeltaNetAttention"),
        *("KimiGatedDeltaNetAttention", "BailingMoeV3KimiDeltaAttention"),
    ),
    module="vllm_hypic.backends.linear.gdn",
    architectures=frozenset(
        {
            "Qwen3NextForCausalLM",
            *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
            *("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
            *("InternS2PreviewForConditionalGeneration", "InternS2MobiusForConditionalGeneration"),
            "OlmoHybridForCausalLM",
            *("KimiLinearForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
            "DeltaNetForCausalLM",
        }
    ),
    drafts=True,
)
SHORT_CONVOLUTION = LinearFamily(
    name="short convolution",
    mamba_type="SHORT_CONV",
    geometry=ConvGeometry,
    stock=("ShortConv",),
    module="vllm_hypic.backends.linear.short_conv",
    architectures=frozenset({"Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"}),
    drafts=True,
)
MAMBA2 = LinearFamily(
    name="Mamba2",
    mamba_type="MAMBA2",
    geometry=DecayGeometry,
    stock=("MambaMixer2",),
    module="vllm_hypic.backends.linear.mamba2",
    architectures=frozenset(
        {
            *("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
            *("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"),
            *("NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3"),
            "GraniteMoeHybridForCausalLM",
            *("FalconH1ForCausalLM", "Zamba2ForCausalLM", "Mamba2ForCausalLM"),
        }
    ),
    drafts=True,
)
MAMBA1 = LinearFamily(
    name="Mamba1",
    mamba_type="MAMBA1",
    geometry=DiagonalGeometry,
    stock=("MambaMixer",),
    module="vllm_hypic.backends.linear.mamba1",
    architectures=frozenset({"JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM"}),
)
LIGHTNING = LinearFamily(
    name="lightning attention",
    mamba_type="LINEAR",
    geometry=RetentionGeometry,
    stock=("BailingMoELinearAttention",),
    module="vllm_hypic.backends.linear.lightning",
    architectures=frozenset(
        {"BailingMoeV2_5ForCausalLM", "BailingMoeLinearV2ForCausalLM", "RetNetForCausalLM"}
    ),
)
GATED_LINEAR = LinearFamily(
    name="gated linear attention",
    mamba_type="CUSTOM",
    geometry=GatedRetentionGeometry,
    stock=(),
    module="vllm_hypic.backends.linear.retention",
    architectures=frozenset({"GLAForCausalLM"}),
)
NOT_SERVED = {
    **dict.fromkeys(
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        "convolutions over n-grams of tokens and sparse attention (QSA), of which records hold nothing",
    ),
    "KimiK3ForConditionalGeneration": (
        "residuals over layers, and delta attention with gates of full rank, which vLLM has in kernels for "
        "GPUs alone (Kimi-Linear is served)"
    ),
}
"""Models with layers like those of a family that are refused by name, and what they have."""
FAMILIES = (GATED_DELTA_NET, SHORT_CONVOLUTION, MAMBA2, MAMBA1, LIGHTNING, GATED_LINEAR)


def family_in(architecture: str) -> LinearFamily | None:
    """The family of the layers that were served in vLLM's model class ``architecture``, or ``None``."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def family_of(mamba_type: str) -> LinearFamily | None:
    """The family of layers whose cache has this type, or ``None``: not supported."""
    return next((family for family in FAMILIES if family.mamba_type == mamba_type), None)
