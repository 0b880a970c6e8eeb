"""Patch: configurations of Ring-linear 2.0, Ring and Ling 2.5 and 2.6, and of Bailing V3 (Ling 3), are read.

Target: transformers' table of configurations by model type, which vLLM reads, too.
Why: neither has a class of type ``bailing_moe_linear`` or ``bailing_hybrid``.  Published models bring one as
code, which a user would have to trust; of it vLLM needs the fields alone.  vLLM has a class for Bailing V3,
as the text of a vision model.
Until: vLLM or transformers has a class for each type.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .signature import require_parameters

MODEL_TYPE, V3 = "bailing_hybrid", "BailingMoeV3ForCausalLM"


class BailingHybridConfig(PreTrainedConfig):
    """The fields of a configuration file; what it says of rotation in any place is found in
    ``rope_parameters``."""

    model_type = MODEL_TYPE

    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Bailing V3 is of the same type."""
        from vllm.transformers_utils.configs import BailingMoeV3TextConfig

        if V3 in (config_dict.get("architectures") or ()):
            return BailingMoeV3TextConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)


class RingLinearConfig(BailingHybridConfig):
    """The same, of Ring-linear 2.0."""

    model_type = "bailing_moe_linear"

    use_rmsnorm: bool = True


def apply() -> None:
    """Idempotent."""
    require_parameters(AutoConfig.register, "model_type", "config")
    for config in (BailingHybridConfig, RingLinearConfig):
        if config.model_type not in CONFIG_MAPPING:
            AutoConfig.register(config.model_type, config)
