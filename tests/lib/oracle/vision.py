"""The oracle of a model that sees and whose tokens meet in attention alone: transformers' own, and a mask.

As in :mod:`.masked` the text of every record and then the stream stand in one sequence. Here all that a token
is (its embedding, an image's where it stands for one, its three coordinates) is transformers' of the whole
prompt, so rows are named by their indices in it.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .masked import additive
from .stream import build_stream


class VisionOracle:
    """Position-independent caching of a Qwen2-VL by transformers' forward, in float64."""

    def __init__(self, model_dir: str | Path):
        from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessor

        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            model_dir, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.processor: Any = Qwen2VLImageProcessor.from_pretrained(model_dir)

    @torch.no_grad()
    def next_token_logprobs(
        self,
        leading: Sequence[int],
        segments: Sequence[Sequence[int]],
        query: Sequence[int],
        images: Sequence[Any],
        *,
        whole: bool = False,
    ) -> Tensor:
        """Of the token behind a composed prompt `[vocabulary]`, with one token in it for each of `images`;
        `whole`: of full recompute."""
        model, image_id = self.model.model, self.model.config.image_token_id
        seen = self.processor(images=list(images), return_tensors="pt")
        grid = seen["image_grid_thw"]
        features = model.get_image_features(seen["pixel_values"].double(), grid)
        sizes = iter([len(one) for one in features.pooler_output])
        pieces = [
            [t for token in piece for t in [token] * (next(sizes) if token == image_id else 1)]
            for piece in (leading, *segments, query)
        ]
        tokens = torch.tensor([token for piece in pieces for token in piece])
        is_image = tokens == image_id
        embeddings = self.model.get_input_embeddings()(tokens)
        embeddings[is_image] = torch.cat(list(features.pooler_output)).to(embeddings.dtype)
        at, _ = model.get_rope_index(tokens[None], is_image[None].int(), image_grid_thw=grid)

        ends = torch.tensor([0, *map(len, pieces)]).cumsum(0).tolist()
        first, *inner, last = (range(a, b) for a, b in pairwise(ends))
        stream = build_stream(*(([], [], range(len(tokens))) if whole else (first, inner, last)))
        texts = [compose.tokens for compose in stream.composes] + [stream.tokens]
        rows = torch.tensor([row for part in texts for row in part])
        text = torch.cat([torch.full((len(part),), i) for i, part in enumerate(texts)])
        row = torch.arange(len(rows))
        visible = (text[:, None] == text) & (row[:, None] >= row)
        begin, own = 0, len(rows) - len(stream.tokens)
        for compose in stream.composes:
            for part in compose.shown:
                visible[own + part.at :, begin + part.lo : begin + part.hi] = True
            begin += len(compose.tokens)
        found = model.language_model(
            inputs_embeds=embeddings[rows][None],
            position_ids=at[:, :, rows],
            attention_mask={"full_attention": additive(visible)},
            use_cache=False,
        )
        return self.model.lm_head(found.last_hidden_state[0, -1]).log_softmax(-1)
