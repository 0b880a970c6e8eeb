"""Patch: vLLM builds Kimi-Linear on CPU.

Target: ``KimiLinearForCausalLM`` in ``vllm.model_executor.models.registry.ModelRegistry``.
Why: vLLM has one model class for NVIDIA and one for AMD, and takes NVIDIA's class on every other platform.
NVIDIA's class has special latent attention for Blackwell GPUs.  AMD's class has vLLM's general latent
attention, which runs on CPU.
Until: vLLM chooses a model class with vLLM's own latent attention on CPU.
"""

from __future__ import annotations

from .signature import require_parameters

ARCHITECTURE = "KimiLinearForCausalLM"
MODULE = "vllm.models.kimi_k3.amd.linear"


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.model_executor.models.registry import ModelRegistry

    require_parameters(ModelRegistry.register_model, "model_arch", "model_cls")
    if getattr(ModelRegistry.models[ARCHITECTURE], "module_name", None) != MODULE:
        ModelRegistry.register_model(ARCHITECTURE, f"{MODULE}:{ARCHITECTURE}")
