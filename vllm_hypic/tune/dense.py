"""A dense model in transformers, whose rows may see any columns, for records and composed prompts.

The computation is differentiable, batched and without pages, and not bit for bit that of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True)
class Columns:
    """Rotated K and V ``[layers, batch, heads, columns, dim]`` and the position of each column."""

    keys: Tensor
    values: Tensor
    positions: Tensor


def joined(parts: Sequence[Columns]) -> Columns:
    """Join columns end to end; parts of batch 1 are repeated for the whole batch."""
    batch = max(p.keys.shape[1] for p in parts)
    return Columns(
        torch.cat([p.keys.expand(-1, batch, -1, -1, -1) for p in parts], 3),
        torch.cat([p.values.expand(-1, batch, -1, -1, -1) for p in parts], 3),
        torch.cat([p.positions for p in parts]),
    )


class Dense:
    """A checkpoint with plain RoPE and full attention in every layer; raises ``ValueError`` otherwise."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model.requires_grad_(False)
        config = self._model.config
        parameters = getattr(config, "rope_parameters", None) or {}
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if (
            parameters.get("rope_type") != "default"
            or kinds != {"full_attention"}
            or parameters.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise ValueError(
                f"{folder}: layers {kinds}, RoPE {parameters}: expected full_attention and default, full RoPE"
            )
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._turns = parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        if (layer := self._first_layer_not_moved()) is not None:
            raise ValueError(
                f"{folder}: layer {layer} does not rotate its keys as Llama does: expected Llama's RoPE in "
                "every layer"
            )

    @torch.no_grad()
    def _first_layer_not_moved(self, by: int = 64) -> int | None:
        """Return the first layer whose keys at later positions are not those that :meth:`moved` gives."""
        ids, positions = torch.arange(1, 5)[None], torch.arange(4)
        found = self.run(ids, positions + by)[1].keys.float()
        wrong = (self.moved(self.run(ids, positions)[1], by).keys.float() - found).flatten(1).norm(dim=1)
        bad = (wrong > 0.1 * found.flatten(1).norm(dim=1)).nonzero()
        return int(bad[0]) if len(bad) else None

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        seen: Columns | None = None,
        *,
        keep: int = 1,
        draws: bool = False,
    ) -> tuple[Tensor, Columns, Tensor | None]:
        """Run rows ``ids [batch, rows]`` over ``seen`` and each other; a row sees columns at or before its
        position in ``positions [rows]``.

        Returns scores of the last ``keep`` rows ``[batch, keep, vocabulary]`` in float32, the rows' columns,
        and each column's attention weight ``[columns]`` (``None`` without ``draws``).  The weights are means
        over layers, batch, heads and rows.
        """
        before = torch.zeros(0, dtype=torch.long) if seen is None else seen.positions
        cache = DynamicCache()
        if seen is not None:
            for layer, (k, v) in enumerate(zip(seen.keys, seen.values, strict=True)):
                cache.update(*(x.to(self._dtype).expand(len(ids), -1, -1, -1) for x in (k, v)), layer)
        hidden = torch.cat([before, positions])[None] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, torch.finfo(self._dtype).min)
        self._model.set_attn_implementation("eager" if draws else "sdpa")
        out = self._model(
            input_ids=ids,
            position_ids=positions.expand(len(ids), -1),
            attention_mask=mask.expand(len(ids), 1, -1, -1),
            past_key_values=cache,
            logits_to_keep=keep,
            output_attentions=draws,
        )
        new = slice(len(before), None)
        keys, values = (
            torch.stack([getattr(layer, name)[:, :, new] for layer in cache.layers])
            for name in ("keys", "values")
        )
        drawn = torch.stack([a.float().mean((0, 1, 2)) for a in out.attentions]).mean(0) if draws else None
        return out.logits.float(), Columns(keys, values, positions), drawn

    def moved(self, columns: Columns, by: int | Tensor) -> Columns:
        """Return the columns rotated by ``by`` further positions, a number or ``[columns]``."""
        shift = torch.as_tensor(by).expand(len(columns.positions))
        angles = (shift[:, None] * self._turns).repeat(1, 2)
        low, high = columns.keys.float().chunk(2, -1)
        keys = columns.keys * angles.cos() + torch.cat([-high, low], -1) * angles.sin()
        return Columns(keys.to(columns.keys.dtype), columns.values, columns.positions + shift)
