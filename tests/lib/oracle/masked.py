"""The oracle of any model whose tokens meet in attention alone: transformers' own forward, and a mask.

Everything that a prompt needs stands in one sequence: the text of every record, at the logical positions that
it has in the prompt, then the stream. A mask says which rows see which columns, and nothing else is ours:

- a record's rows see the record's own past;
- a stream row sees the stream's past, and of each record the interior, once its compose point is passed;
- where a layer has a window, of these those at a logical distance below it.

That a record is computed at its logical positions changes nothing but the rotation of its K: what rows of one
text see of each other depends on distances alone.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .faults import SEAM_FAULTS, SHARED_KV_FAULTS, WINDOW_FAULTS
from .stream import build_stream

FAULTS = {
    *SEAM_FAULTS,
    *WINDOW_FAULTS,
    *SHARED_KV_FAULTS,
    *("no_public_kv", "wrong_rotation", "early_visibility", "stream_positions", "separator_positions"),
}


class MaskedOracle:
    """Position-independent caching of a checkpoint by transformers' forward, in float64.

    `by_embeddings`: it is given embeddings for tokens, without those that single layers have of them: vLLM's
    Gemma 3n for text alone leaves these out.
    """

    def __init__(self, model_dir: str | Path, *, by_embeddings: bool = False):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.config, self.by_embeddings = self.model.config, by_embeddings

    def full_logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Of the next token `[vocabulary]`, every row computed behind all before it."""
        return self.next_token_logprobs([], [], tokens)

    def next_token_logprobs(
        self,
        leading: Sequence[int],
        segments: Sequence[Sequence[int]],
        query: Sequence[int],
        *,
        head: int = 8,
        tail: int = 8,
        generated: Sequence[int] = (),
        fault: str | None = None,
    ) -> Tensor:
        """Of the token behind a composed prompt `[vocabulary]`, `generated` being its first answer tokens."""
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"unknown fault {fault!r}")
        stream = build_stream(
            leading, segments, query, head=head, tail=tail, generated=generated, fault=fault
        )
        texts = [compose.tokens for compose in stream.composes] + [stream.tokens]
        places = [range(c.start, c.start + len(c.tokens)) for c in stream.composes] + [stream.positions]
        begins = [sum(map(len, texts[:i])) for i in range(len(texts))]
        tokens, at = (torch.tensor([x for part in parts for x in part]) for parts in (texts, places))
        text = torch.cat([torch.full((len(part),), i) for i, part in enumerate(texts)])
        row, own = torch.arange(len(tokens)), begins[-1]
        if fault == "stream_positions":
            at[own:] = torch.arange(len(stream.tokens))
        elif fault == "wrong_rotation":
            at[:own] = torch.tensor([i for part in texts[:-1] for i in range(len(part))])

        visible = (text[:, None] == text) & (row[:, None] >= row)
        public = torch.zeros_like(visible)
        for compose, begin in zip(stream.composes, begins, strict=False):
            for part in compose.shown if fault != "no_public_kv" else ():
                first = max(own, own + part.at - (compose.lo if fault == "early_visibility" else 0))
                public[first:, begin + part.lo : begin + part.hi] = True
        distance = at[:, None] - at
        if fault == "stream_windows":
            distance[own:, own:] = row[own:, None] - row[own:]
        near = distance < self.config.sliding_window
        full, sliding = visible | public, (visible | public) & near
        if fault == "public_without_windows":
            sliding = (visible & near) | public

        masks = {"full_attention": full, "sliding_attention": sliding}
        hooks = []
        if fault == "readers_without_public":
            for layer in self.model.model.layers[-self.config.num_kv_shared_layers :]:
                without = masks[self.config.layer_types[layer.self_attn.layer_idx]] & ~public
                see = partial(_with_mask, mask=additive(without))
                hooks.append(layer.self_attn.register_forward_pre_hook(see, with_kwargs=True))
        try:
            with torch.no_grad():
                given = {"input_ids": tokens[None]}
                if self.by_embeddings:
                    given = {"inputs_embeds": self.model.get_input_embeddings()(tokens[None])}
                found = self.model(
                    **given,
                    position_ids=at[None],
                    attention_mask={kind: additive(mask) for kind, mask in masks.items()},
                    use_cache=False,
                )
        finally:
            for hook in hooks:
                hook.remove()
        return found.logits[0, -1].double().log_softmax(-1)


def additive(visible: Tensor) -> Tensor:
    """The mask that transformers adds to scores, of one that says what is visible `[rows, columns]`."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))[None, None]


def _with_mask(module: object, args: tuple[Any, ...], kwargs: dict[str, Any], *, mask: Tensor) -> Any:
    return args, kwargs | {"attention_mask": mask}
