"""Model classes of ours for published models that vLLM has no class for.

vLLM takes them by its registration of models from outside its tree; a name that vLLM knows stays vLLM's.
"""

from __future__ import annotations

MODELS = {
    "BailingMoeLinearV2ForCausalLM": "vllm_hypic.models.ring_linear:RingLinearForCausalLM",
}
"""By the architecture that a configuration names: module and class, imported where such a model is asked
for."""


def register() -> None:
    """Make them known to vLLM.  May run any number of times."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture, where in MODELS.items():
        if architecture not in ModelRegistry.models:
            ModelRegistry.register_model(architecture, where)
