"""The table of linear-attention families whose layers take part in PIC, which all parts of an engine read.

To add a family, add a folder beside ``backends/linear/gdn`` and a row here.  The folder has the layer class
(see ``backends/linear/base.py``) and a function ``register``.  Scheduler and workers size the pool by the
rows, so the rows name folders and do not import them.  A new kind of transition needs a class in
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
    """A family's names in vLLM, and the place of its layers.

    ``name``: its name in messages; ``mamba_type``: its name in vLLM's ``MambaAttentionBackendEnum``;
    ``geometry``: layout of a layer's records; ``stock``: vLLM's layer classes; ``module``: module whose
    ``register`` replaces them by the plugin's; ``architectures``: model classes, of vLLM or the plugin, that
    keep only KV and these layers' states of a prompt.  For text prompts, models with vision are among them.
    Other models may use the same layer class and keep more state that the plugin cannot compose.  The engine
    refuses these models (:data:`NOT_SERVED`: by name, with that state).  No model class is in two rows, as a
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
        "convolutions over n-grams of tokens and sparse attention (QSA), whose data records do not hold",
    ),
    "KimiK3ForConditionalGeneration": (
        "residuals over layers, and delta attention with gates of full rank, for which vLLM has kernels on "
        "GPUs only (Kimi-Linear is served)"
    ),
}
"""Models that are refused by name although a family has similar layers, and the reason for each."""
FAMILIES = (GATED_DELTA_NET, SHORT_CONVOLUTION, MAMBA2, MAMBA1, LIGHTNING, GATED_LINEAR)


def family_in(architecture: str) -> LinearFamily | None:
    """Return the family of the layers in model class ``architecture``, or ``None`` if it is not served."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def family_of(mamba_type: str) -> LinearFamily | None:
    """Return the family of layers with a cache of this type, or ``None`` for a type that is not supported."""
    return next((family for family in FAMILIES if family.mamba_type == mamba_type), None)
