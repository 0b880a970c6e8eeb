"""The first linear layer in float64, token by token, from the model's own weights.

Its inputs are embeddings: they do not depend on how the prompt was put together, so the state behind a
prompt has one true value, and so have T and S of each of its segments.  Runs in the engine's process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine_calls import layers

if TYPE_CHECKING:
    import torch

    from vllm_hypic.backends.ops.gated_delta.reference import DeltaTokens


EPS = 1e-6
"""Epsilon of the l2 norm of q and k."""


def refusal(llm: Any) -> str | None:
    """Why the true state of this model's first layer is not known here, or ``None``."""
    found = _first(llm)
    return found if isinstance(found, str) else None


def true_state(llm: Any, tokens: list[int]) -> np.ndarray:
    """State ``[heads, K, V]`` float64 of the first layer after ``tokens``.  See :func:`refusal` first."""
    return first_layer(llm, tokens).state().numpy()


def first_layer(llm: Any, tokens: list[int]) -> DeltaTokens:
    """What the recurrence of the first layer takes for ``tokens``, in float64.

    Raises ``RuntimeError`` where there is a :func:`refusal`.
    """
    import torch
    import torch.nn.functional as F

    from vllm_hypic.backends.ops.gated_delta.reference import DeltaTokens

    found = _first(llm)
    if isinstance(found, str):
        raise RuntimeError(found)
    layer, norm = found
    [model] = llm.collective_rpc("get_model")
    with torch.inference_mode():
        table = model.embed_input_ids(torch.tensor(tokens)).double()
        maps = _Maps.of(layer, table.shape[1])
    normed = table * torch.rsqrt(table.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    x = normed * (1 + norm.weight.detach().double())
    weight = layer.conv_weight().detach().double()
    width = weight.shape[1]
    rows = F.pad(x @ maps.qkv, (0, 0, width - 1, 0))
    mixed = sum(rows[i : i + len(tokens)] * weight[:, i] for i in range(width))
    if layer.conv1d.bias is not None:
        mixed = mixed + layer.conv1d.bias.detach().double()
    mixed = F.silu(mixed)
    sizes = [layer.key_dim // layer.tp_size] * 2 + [layer.value_dim // layer.tp_size]
    query, key, value = mixed.split(sizes, -1)
    step = F.softplus(x @ maps.a + layer.dt_bias.detach().double())
    return DeltaTokens(
        q=query.unflatten(-1, (-1, layer.head_k_dim)),
        k=key.unflatten(-1, (-1, layer.head_k_dim)),
        v=value.unflatten(-1, (-1, layer.head_v_dim)),
        beta=(x @ maps.b).sigmoid(),
        g=-layer.A_log.detach().double().exp() * step,
        eps=EPS,
    )


def _first(llm: Any) -> tuple[Any, Any] | str:
    """The first linear layer and the norm before it; or why they are not what this file knows."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    names = layers(llm).linear
    if not names:
        return "the model has no linear-attention layers"
    layer = llm.llm_engine.vllm_config.compilation_config.static_forward_context[names[0]]
    [model] = llm.collective_rpc("get_model")
    decoders = {name: m for name, m in model.named_modules() if getattr(m, "linear_attn", None) is layer}
    if len(decoders) != 1:
        return f"layer {names[0]} has no decoder layer of the known form around it"
    [(name, decoder)] = decoders.items()
    if not name.endswith(".0"):
        return f"{name} is the first linear layer: its inputs come from full attention"
    norm = getattr(decoder, "input_layernorm", None)
    if not isinstance(norm, GemmaRMSNorm):
        return f"the norm of {name} is a {type(norm).__name__}, expected GemmaRMSNorm"
    return layer, norm


@dataclass(frozen=True)
class _Maps:
    """The layer's input projections as matrices ``[hidden, ...]``, float64."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor

    @staticmethod
    def of(layer: Any, hidden: int) -> _Maps:
        """vLLM may have packed the weights for its kernels.  What the projections make of unit vectors is one
        product and zeros each: the weights themselves, to the bit."""
        import torch

        dtype = layer.A_log.dtype if layer.A_log.dtype != torch.float32 else layer.conv_weight().dtype
        qkv, _, b, a = layer._project(torch.eye(hidden, dtype=dtype))
        return _Maps(qkv.double(), b.double(), a.double())
