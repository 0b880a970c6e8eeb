"""Patch: Kimi-Linear is built on CPU.

Target: ``KimiLinearForCausalLM`` in ``vllm.model_executor.models.registry.ModelRegistry``.
Why: vLLM has the model twice, for NVIDIA and for AMD, and takes NVIDIA's on every other platform.  That one
has latent attention of its own, for Blackwell GPUs; AMD's has vLLM's, which runs on CPU.
Until: vLLM chooses a model class with vLLM's own latent attention on CPU.
"""

from __future__ import annotations

from .signature import require_parameters

ARCHITECTURE = "KimiLinearForCausalLM"
MODULE = "vllm.models.kimi_k3.amd.linear"


def apply() -> None:
    """Idempotent."""
    from vllm.model_executor.models.registry import ModelRegistry

    require_parameters(ModelRegistry.register_model, "model_arch", "model_cls")
    if getattr(ModelRegistry.models[ARCHITECTURE], "module_name", None) != MODULE:
        ModelRegistry.register_model(ARCHITECTURE, f"{MODULE}:{ARCHITECTURE}")
