"""The description of an engine, from which routers plan prompts as the engine does."""

from __future__ import annotations

from ...config.engine import HypicConfig
from ...segment_parallel.description import Description
from .planning import Planner


def describe(
    config: HypicConfig,
    planner: Planner,
    instance: str,
    models: tuple[str, ...],
    max_model_len: int,
    ranks: int,
) -> Description | None:
    """Return the description of the engine ``instance``; ``None`` without segment parallelism.

    ``models``: names under which the engine serves its model.  ``ranks``: number of workers.
    """
    if (parallel := config.segment_parallel) is None:
        return None
    ids, traits = planner.ids, planner.traits
    return Description(
        instance=instance,
        models=models,
        namespace=planner.namespace.digest,
        generation=planner.namespace.generation,
        receiver=parallel.receiver_url,
        events=parallel.events_url,
        ranks=ranks,
        separator=ids.sep,
        pdep=ids.pdep,
        pad=ids.pad,
        link=config.link,
        seam_tokens=config.seam_tokens,
        context=config.context,
        islands=config.islands,
        context_tokens=planner.tokens_behind(config.context),
        learned="" if planner.learned is None else planner.learned.digest,
        min_segment_tokens=config.min_segment_tokens,
        checkpoint_tokens=config.checkpoint_tokens,
        reads_successors=planner.reads_successors,
        max_model_len=max_model_len,
        has_linear=traits.has_linear,
        has_transition=traits.has_transition,
        limits=planner.limits(),
        deadline_s=parallel.deadline_s,
        quadratic=planner.quadratic,
        shared_tiers=planner.shared_tiers,
        literal_text=config.token_texts.literal,
    )
