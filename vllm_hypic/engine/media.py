"""Finds the place and the number of positions of images, videos and audio in vLLM's requests, and selects
the media that a stream computes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..primitives.media import Media, Medium
from ..primitives.pieces import PromptError
from ..primitives.plan import PromptPlan

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

MODALITIES = ("image", "video", "audio")
"""Kinds of input that prompts with segments may have beside text."""


def refused_media(features: Sequence[MultiModalFeatureSpec], vllm_config: VllmConfig) -> str | None:
    """Return why prompts with segments cannot have these inputs, or ``None`` if these inputs are allowed."""
    model = vllm_config.model_config
    processing = model.get_multimodal_config()
    for feature in features:
        if feature.modality not in MODALITIES:
            *some, last = MODALITIES
            return f"{feature.modality} inputs are not supported: expected {', '.join(some)} or {last} inputs"
    inputs = f"{features[0].modality} inputs"
    if model.is_encoder_decoder:
        return f"{inputs} of encoder-decoder models are not supported"
    if model.is_mm_prefix_lm:
        return f"{inputs} are not supported by this model: its images attend to later tokens"
    if not processing.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        return (
            f"{inputs} need hashes, which vLLM computes for its caches only: "
            "expected --enable-prefix-caching, or --mm-processor-cache-gb above 0"
        )
    if model.uses_mrope:
        if _has_windows(model):
            return (
                f"{inputs} are not supported by this model: its windows count tokens, "
                "but its three-dimensional positions (M-RoPE) do not"
            )
        if processing.mm_processor_cache_gb and processing.mm_processor_cache_type == "shm":
            return (
                f"{inputs} are not supported with --mm-processor-cache-type shm, "
                "which hides the size of images from the scheduler: expected lru"
            )
    return None


def _has_windows(model: ModelConfig) -> bool:
    text = model.hf_text_config
    if kinds := getattr(text, "layer_types", None):
        return any("sliding" in kind for kind in kinds)
    return model.get_sliding_window() is not None and getattr(text, "use_sliding_window", True)


def placed(features: Sequence[MultiModalFeatureSpec]) -> Media:
    """Return the places of a prompt's media, by indices of the prompt's tokens.
    Raises :class:`PromptError` if a medium lies inside another medium."""
    media: list[Medium] = []
    for feature in features:
        at = feature.mm_position
        if media and at.offset < media[-1].stop:
            raise PromptError(
                f"{feature.modality} at token {at.offset} lies inside the preceding input, as with "
                "use_audio_in_video: remove separators and segments"
            )
        media.append(Medium(at.offset, at.offset + at.length, feature.identifier))
    return tuple(media)


class MediaReader:
    """Reads the media of one engine's requests; for one thread."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def of(self, features: Sequence[MultiModalFeatureSpec], token_ids: Sequence[int]) -> Media:
        """Return the media of a prompt, by indices of the prompt's tokens, with M-RoPE's positions.

        Raises :class:`PromptError` if a medium lies inside another medium, or its positions are not known.
        """
        media = placed(features)
        if not self._model.uses_mrope:
            return media
        return tuple(
            self._measured(medium, feature, list(token_ids[medium.start : medium.stop]))
            for medium, feature in zip(media, features, strict=True)
        )

    @cached_property
    def _positions(self) -> Any:
        """The model class's own method for three-dimensional positions, on an object without weights.
        The method only reads the configuration."""
        from vllm.model_executor.model_loader.utils import get_model_cls

        cls: Any = get_model_cls(self._model)
        unbuilt = object.__new__(cls)
        config = self._model.hf_config
        # vLLM builds only the thinker of models that also speak; the thinker sees and hears.
        object.__setattr__(unbuilt, "config", getattr(config, "thinker_config", config))
        return unbuilt.get_mrope_input_positions

    def _measured(self, medium: Medium, feature: MultiModalFeatureSpec, tokens: list[int]) -> Medium:
        """Return ``medium`` with the positions that the model's rule gives to the medium alone."""
        length, here = len(tokens), [moved(feature, 0)]
        try:
            alone, _ = self._positions(tokens, here)
            found, _ = self._positions([*tokens, 0], here)
        except (AttributeError, KeyError, TypeError, AssertionError, NotImplementedError) as e:
            raise PromptError(
                f"{self._model.architecture} cannot compute the positions behind {feature.modality} inputs "
                f"without a loaded model ({type(e).__name__}: {e}): remove separators and segments"
            ) from e
        except RuntimeError as e:
            # The same error in the worker would end the engine.
            raise PromptError(
                f"{self._model.architecture} needs a token behind {feature.modality} inputs, where a segment "
                f"may end ({e}): remove separators and segments"
            ) from e
        time, behind = found[0].tolist(), set(found[:, -1].tolist())
        if alone.shape[1] != length or len(time) != length + 1 or len(behind) > 1:
            raise PromptError(
                f"{self._model.architecture} gives the first token behind {feature.modality} inputs "
                "different positions by dimension: remove separators and segments"
            )
        if time == list(range(length + 1)):
            return medium
        return replace(medium, offsets=tuple(time[:-1]), span=time[-1])


def in_stream(features: Sequence[MultiModalFeatureSpec], plan: PromptPlan) -> list[MultiModalFeatureSpec]:
    """Return the inputs of the media that the plan's stream computes, moved to their places in the stream."""
    found = []
    for feature, medium in zip(features, plan.media, strict=True):
        at = bisect_left(plan.positions, medium.start)
        if at < len(plan.positions) and plan.positions[at] == medium.start:
            found.append(moved(feature, at))
    return found


def moved(feature: MultiModalFeatureSpec, offset: int) -> MultiModalFeatureSpec:
    """Return the input at another place: its first token at index ``offset``."""
    return replace(feature, mm_position=replace(feature.mm_position, offset=offset))
