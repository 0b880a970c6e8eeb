"""Model classes for published models without a class in vLLM.

vLLM gets these classes through its registration of out-of-tree models; a name that vLLM knows stays vLLM's.
"""

from __future__ import annotations

MODELS = {
    "BailingMoeLinearV2ForCausalLM": "vllm_hypic.models.ring_linear:RingLinearForCausalLM",
    "DeltaNetForCausalLM": "vllm_hypic.models.fla:DeltaNetForCausalLM",
    "GLAForCausalLM": "vllm_hypic.models.fla:GLAForCausalLM",
    "RetNetForCausalLM": "vllm_hypic.models.fla:RetNetForCausalLM",
}
"""Module and class by the architecture that a configuration names; vLLM imports a class when needed."""


def register() -> None:
    """Register the model classes and their configurations in vLLM; repeated calls change nothing."""
    from vllm.model_executor.models.registry import ModelRegistry

    from . import fla_config

    fla_config.register()
    for architecture, where in MODELS.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, where)
