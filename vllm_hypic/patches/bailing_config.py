"""Patch: configurations of Ring and Ling 2.5 and 2.6 are read.

Target: transformers' table of configurations by model type, which vLLM reads, too.
Why: neither has a class of type ``bailing_hybrid``.  Published models bring one as code, which a user would
have to trust; of it vLLM needs the fields alone.
Until: vLLM or transformers has a class for the type.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .signature import require_parameters

MODEL_TYPE = "bailing_hybrid"


class BailingHybridConfig(PreTrainedConfig):
    """The fields of a configuration file; what it says of rotation in any place is found in
    ``rope_parameters``."""

    model_type = MODEL_TYPE

    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None


def apply() -> None:
    """Idempotent."""
    require_parameters(AutoConfig.register, "model_type", "config")
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, BailingHybridConfig)
