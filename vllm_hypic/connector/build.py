"""Builds the connector's two halves from vLLM's configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.platforms import current_platform

from ..config.drafting import drafts_by_a_head, looks_drafts_up
from ..config.engine import HypicConfig, config_of
from ..config.segment_parallel import Address, SegmentParallelConfig
from ..errors import ConfigError
from ..fingerprint import weights_digest
from ..pool.codec import RankPart, RecordCodec
from ..pool.copy.base import RecordMover
from ..pool.geometry import PoolGeometry, pool_geometry, quantised_dtype
from ..pool.learned import LearnedRows
from ..pool.tensors import DevicePool
from ..primitives.context import LearnedContext, context_tokens
from ..primitives.token_texts import TokenTexts, special_tokens
from ..primitives.tokens import PrimitiveIds, primitive_ids
from ..primitives.windows import Words
from ..store.build import build_store
from ..store.eviction.flops import FlopModel
from ..store.shared import shared_tiers
from .identity import namespace_of
from .scheduler.connector import SchedulerConnector
from .scheduler.entries import Need
from .scheduler.island_runs import IslandRuns
from .scheduler.planning import NO_TOKENIZER, PlanningTexts
from .worker.connector import WorkerConnector
from .worker.link import RecordLink
from .worker.shared_tier_link import SharedTierLink
from .worker.store_link import StoreLink
from .worker.transfer_link import TransferLink

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = init_logger("vllm.hypic.connector")


def geometry_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> PoolGeometry:
    """Return the pool's geometry for all pipeline stages, the same in every process."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.platforms import current_platform

    config, on_cpu = config_of(vllm_config), current_platform.is_cpu()
    return pool_geometry(
        kv_cache_config,
        config,
        quantised_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype),
        conv_dim_first=is_conv_state_dim_first(),
        # On CPU the states behind a draft have slots of their own (``backends/linear/drafted.py``).
        draft_rows=0 if on_cpu else vllm_config.num_speculative_tokens,
        states_in_pages=on_cpu and config.prefix == "sparse",
    )


def primitive_ids_of(vllm_config: VllmConfig, config: HypicConfig) -> PrimitiveIds:
    """Return the ids of separator, PDep and padding, from the configuration or the tokenizer."""
    if config.token_ids is not None:
        return config.token_ids
    tokenizer = _tokenizer(vllm_config)
    if tokenizer is None:
        raise ConfigError(
            "hypic config: skip_tokenizer_init needs token_ids={'sep': .., 'pdep': .., 'pad': ..}"
        )
    return primitive_ids(tokenizer)


def planning_texts_of(vllm_config: VllmConfig, config: HypicConfig) -> PlanningTexts:
    if vllm_config.model_config.skip_tokenizer_init:
        return replace(NO_TOKENIZER, learned=config.learned)

    def words() -> Words:
        tokenizer = _tokenizer(vllm_config)
        return Words(TokenTexts(tokenizer).of, special_tokens(tokenizer))

    return PlanningTexts(
        lambda: context_tokens(_tokenizer(vllm_config), config.text),
        words,
        config.learned,
    )


def _tokenizer(vllm_config: VllmConfig) -> Any:
    """Return the model's tokenizer; ``None`` with ``skip_tokenizer_init``."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def build_scheduler_connector(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerConnector:
    config = config_of(vllm_config)
    geometry = geometry_of(vllm_config, kv_cache_config)
    side = SchedulerConnector(
        config,
        geometry,
        namespace_of(vllm_config, geometry),
        vllm_config.model_config.max_model_len,
        lambda: primitive_ids_of(vllm_config, config),
        _flop_model(vllm_config, geometry).prefill,
        vllm_config.parallel_config.world_size,
        planning_texts_of(vllm_config, config),
        partial(_island_runs, vllm_config, kv_cache_config) if geometry.linear else None,
        drafts_by_a_head(vllm_config),
        _keeps_answers(vllm_config, config),
    )
    warn_of_little_room(side)
    return side


def _keeps_answers(vllm_config: VllmConfig, config: HypicConfig) -> bool:
    """Whether prefixes grow with the tokens behind them.  Not with a drafting model, whose layers run on
    tokens that may be rejected.  Not with several stages, where passes in flight have unknown tokens.  Not on
    GPUs, where a pass with captures replays no full graph."""
    if config.prefix == "stock":
        return False
    if vllm_config.speculative_config is not None and not looks_drafts_up(vllm_config):
        return False
    return vllm_config.parallel_config.pipeline_parallel_size == 1 and current_platform.is_cpu()


def _island_runs(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> IslandRuns:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    # On CPUs, vLLM resets the block size in an engine's configuration once the scheduler has been made.
    # Blocks of hybrid models are larger, but passes end at multiples of that size.
    unit = math.gcd(unit, vllm_config.cache_config.block_size)
    scheduler = vllm_config.scheduler_config
    limits = (
        scheduler.max_num_batched_tokens,
        scheduler.max_num_scheduled_tokens or 0,
        scheduler.long_prefill_token_threshold,
    )
    return IslandRuns.for_engine(unit, min(limit for limit in limits if limit > 0))


def warn_of_little_room(side: SchedulerConnector) -> None:
    """Log a warning if a segment of the expected length exceeds one request's share of the pool."""
    geometry, tokens = side.geometry, side.config.expected_segment_tokens
    needed = side.directory.space_for(Need(tokens, geometry.record_transition_blocks))
    most = side.planner.request_share
    if not most.covers(needed):
        logger.warning(
            "a segment of expected_segment_tokens=%d tokens takes %d bytes of the pool, but a request may "
            "take only %d: requests do not reuse segments beyond this limit; raise pool_bytes, "
            "max_request_fraction or max_tenant_fraction, or lower expected_segment_tokens",
            tokens,
            geometry.bytes_of(needed),
            geometry.bytes_of(most),
        )


def _flop_model(vllm_config: VllmConfig, geometry: PoolGeometry) -> FlopModel:
    return FlopModel.from_hf_config(
        vllm_config.model_config.hf_text_config,
        attention_layers=len(geometry.attention),
        linear_layers=len(geometry.linear),
    )


def build_worker_connector(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerConnector:
    whole, config = geometry_of(vllm_config, kv_cache_config), config_of(vllm_config)
    namespace, parallel = namespace_of(vllm_config, whole), vllm_config.parallel_config
    geometry = whole.stage({name for group in kv_cache_config.kv_cache_groups for name in group.layer_names})
    heads = RankPart(get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)

    def open_links(pool: DevicePool, mover: RecordMover) -> list[RecordLink]:
        part = RankPart(get_pp_group().rank_in_group * heads.world + heads.rank, parallel.world_size)
        links: list[RecordLink] = []
        if config.segment_parallel is not None:
            if parallel.nnodes > 1:
                raise ConfigError(
                    f"hypic config: segment_parallel: nnodes={parallel.nnodes}: expected 1, as an engine's "
                    "ranks listen at one address"
                )
            codec = RecordCodec(pool, namespace, part, mover)
            links.append(_open_transfer(config.segment_parallel, codec))
        if (store := build_store(config.store, namespace.digest, part.rank, part.world)) is not None:
            link = StoreLink(store, RecordCodec(pool, namespace, part, mover))
            links.append(link)
            if config.segment_parallel is not None:
                links.append(SharedTierLink(link, shared_tiers(config.store)))
        return links

    learned = None
    if config.learned is not None:
        _require_weights_of(config.learned, vllm_config)
        learned = LearnedRows.of(config.learned, whole, heads).of_stage(geometry)
    return WorkerConnector(geometry, config, open_links, learned)


def _require_weights_of(context: LearnedContext, vllm_config: VllmConfig) -> None:
    model = vllm_config.model_config
    digest = weights_digest(model.model, model.revision, vllm_config.load_config.download_dir)
    if digest != context.model:
        raise ConfigError(f"hypic config: context_file={str(context.path)!r} is of other weights: retrain it")


def _open_transfer(config: SegmentParallelConfig, codec: RecordCodec) -> TransferLink:
    from ..segment_parallel.nixl import open_nixl
    from ..segment_parallel.permits import Permits
    from ..segment_parallel.receiver import Receiver
    from ..segment_parallel.secret import Secret
    from ..segment_parallel.sender import Sender

    namespace, secret = codec.namespace.digest, Secret.read(config.secret_file)
    Permits.read(config.secret_file)  # a wrong file should fail the start, not the first request
    exporter, puller = open_nixl(config) if config.transport == "nixl" else (None, None)
    listen, events = Address.parse(config.listen), Address.parse(config.events)
    if listen.port < events.port < listen.port + codec.part.world:
        raise ConfigError(
            f"hypic config: segment_parallel: events={config.events!r}: expected a port outside "
            f"{listen.port} to {listen.port + codec.part.world - 1}, where the ranks listen"
        )
    try:
        url = listen.of_rank(codec.part.rank).url
    except ValueError as e:
        raise ConfigError(f"hypic config: segment_parallel: listen={e}") from e
    receiver = Receiver(url, namespace, secret, codec.pool.geometry.nbytes, puller)
    return TransferLink(receiver, Sender(namespace, secret, exporter), codec)
