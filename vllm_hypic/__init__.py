"""Position-independent caching for hybrid-attention LLMs, as a plugin of stock vLLM."""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """vLLM's general-plugin entry point; runs in every process, any number of times.

    Makes names known (backend, connector, tokenizer mode, models that vLLM has no class for) and hooks in
    where vLLM has no extension point.  Engines that do not ask for ``--attention-backend hypic`` are
    untouched.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from . import models
    from .engine.tokenizer import register_mode
    from .patches import (
        all_stages,
        backend_name,
        cpu_backend_choice,
        cuda_backend_choice,
        engine_args,
        engine_calls,
        engine_inbox,
        engine_stop,
        null_prompt_logprobs,
        request_check,
    )

    for patch in (
        all_stages,
        backend_name,
        cpu_backend_choice,
        cuda_backend_choice,
        engine_args,
        engine_calls,
        engine_inbox,
        engine_stop,
        null_prompt_logprobs,
        request_check,
    ):
        patch.apply()
    if "HypicConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "HypicConnector", "vllm_hypic.connector.connector", "HypicConnector"
        )
    models.register()
    register_mode()
