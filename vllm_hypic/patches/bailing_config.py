"""Patch: vLLM reads configurations of Ring-linear 2.0, Ring and Ling 2.5 and 2.6, and Bailing V3 (Ling 3).

Target: transformers' table of configurations by model type, which vLLM also reads.
Why: vLLM and transformers have no class of type ``bailing_moe_linear`` or ``bailing_hybrid``.  Published
models bring such a class as code that a user would have to trust; vLLM needs only its fields.  vLLM has a
class for Bailing V3, as the text part of a vision model.
Until: vLLM or transformers has a class for each type.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .signature import require_parameters

MODEL_TYPE, V3 = "bailing_hybrid", "BailingMoeV3ForCausalLM"


class BailingHybridConfig(PreTrainedConfig):
    """The fields of a configuration file; ``rope_parameters`` collects rotation settings from any place."""

    model_type = MODEL_TYPE

    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration; Bailing V3 has the same model type, but gets vLLM's own class."""
        from vllm.transformers_utils.configs import BailingMoeV3TextConfig

        if V3 in (config_dict.get("architectures") or ()):
            return BailingMoeV3TextConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)


class RingLinearConfig(BailingHybridConfig):
    """The fields of a configuration file of Ring-linear 2.0."""

    model_type = "bailing_moe_linear"

    use_rmsnorm: bool = True


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    require_parameters(AutoConfig.register, "model_type", "config")
    for config in (BailingHybridConfig, RingLinearConfig):
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)
