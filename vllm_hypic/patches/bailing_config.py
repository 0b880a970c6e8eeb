"""Patch: configurations of Ring and Ling 2.5 and 2.6 are read.

Target: transformers' table of configurations by model type, which vLLM reads, too.
Why: neither has a class of type ``bailing_hybrid``.  Published models bring one as code, which a user would
have to trust; of it vLLM needs the fields alone.
Until: vLLM or transformers has a class for the type.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .signature import require_parameters

MODEL_TYPE = "bailing_hybrid"


class BailingHybridConfig(PreTrainedConfig):
    """The fields of a configuration file."""

    model_type = MODEL_TYPE


def apply() -> None:
    """Idempotent."""
    require_parameters(AutoConfig.register, "model_type", "config")
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, BailingHybridConfig)
