"""Patch: the name ``hypic`` in ``AttentionBackendEnum``.

Target: ``vllm.v1.attention.backends.registry.AttentionBackendEnum``.
Why: ``register_backend("HYPIC", ...)`` adds a member that does not survive pickling to the engine
process; the built-in ``CUSTOM`` does.  The patch therefore registers the plugin's class for ``CUSTOM``, and
makes ``HYPIC`` an alias of ``CUSTOM``.  A class that another plugin has registered for ``CUSTOM`` stays.
Until: vLLM pickles dynamically registered backends by name.
"""

from __future__ import annotations

BACKEND = "vllm_hypic.backends.attention.backend.HypicAttentionBackend"


def apply() -> None:
    """Apply the patch; repeated calls change nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    AttentionBackendEnum._member_map_.setdefault("HYPIC", AttentionBackendEnum.CUSTOM)


def class_of_another_plugin() -> str | None:
    """Return the path of the class that another plugin has registered for ``CUSTOM``, or ``None``."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return None if not custom.is_overridden() or custom.get_path() == BACKEND else custom.get_path()
