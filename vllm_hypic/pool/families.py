"""The linear-attention families whose layers take part in PIC: one table, which all parts of an engine read.

To add a family: a folder beside ``backends/linear/gdn`` that holds the layer class (see
``backends/linear/base.py``) and has a function ``register``; and a row here.  Scheduler and workers size the
pool by the rows, so these name the folders and do not import them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearFamily:
    """A family as vLLM knows it, and where its layers are.

    ``name``: as messages call it; ``mamba_type``: its name in vLLM's ``MambaAttentionBackendEnum``;
    ``state_ranks``: dimensions of its convolution's and of its recurrence's state; ``stock``: vLLM's layer
    class; ``module``: where ``register`` replaces that class by ours; ``architectures``: vLLM's model classes
    that were served with these layers.  Others may use the very class and keep more beside it that nobody
    composes (Qwen4Exp: convolutions over n-grams, sparse attention), so they are refused.
    """

    name: str
    mamba_type: str
    state_ranks: tuple[int, ...]
    stock: str
    module: str
    architectures: frozenset[str]


GATED_DELTA_NET = LinearFamily(
    name="gated delta net",
    mamba_type="GDN_ATTN",
    state_ranks=(2, 3),
    stock="QwenGatedDeltaNetAttention",
    module="vllm_hypic.backends.linear.gdn",
    architectures=frozenset(
        {
            "Qwen3NextForCausalLM",
            *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        }
    ),
)
FAMILIES = (GATED_DELTA_NET,)


def family_of(mamba_type: str) -> LinearFamily | None:
    """The family of layers whose cache has this type, or ``None``: not supported."""
    return next((family for family in FAMILIES if family.mamba_type == mamba_type), None)
