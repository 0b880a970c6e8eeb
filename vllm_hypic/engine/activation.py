"""Turns ``--attention-backend hypic`` into a complete engine configuration."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.logger import init_logger

from ..config.drafting import refusal as refusal_of_drafts
from ..config.drafting import see_text_alike
from ..config.engine import CONNECTOR, MULTI, SECTION, TOKENIZER_MODE, HypicConfig, config_of, own_options
from ..errors import ConfigError, redacted
from ..patches import (
    bailing_config,
    cpu_kernel_overrides,
    cpu_kimi_model,
    cpu_mla_blocks,
    engine_interrupt,
    engine_parent,
    engine_stop,
)
from ..patches.backend_name import class_of_another_plugin
from ..pool.families import NOT_SERVED, family_in

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger("vllm.hypic.activation")

SCHEDULER = "vllm_hypic.engine.scheduler.HypicScheduler"
CPU_WORKER = "vllm_hypic.engine.cpu_worker.HypicCPUWorker"
CUDA_WORKER = "vllm_hypic.engine.cuda_worker.HypicGPUWorker"
TEARDOWN_S = 10.0
"""Seconds in which an engine and its workers end, without the time that the store takes."""


def choose(args: EngineArgs) -> bool:
    """Set scheduler, connector, worker and primitives' texts in ``args`` if the backend is ``hypic``.

    Explicit ``--kv-transfer-config`` and ``--additional-config`` refine the settings.  Returns whether the
    backend is ``hypic``; raises :class:`ConfigError` for options that ``hypic`` cannot be combined with.
    """
    if not _backend_is_hypic(args):
        return False
    config = _config(args)
    _use("scheduler_cls", args, None, SCHEDULER)
    _use_worker(args)
    _use_connector(args, config)
    # vLLM hashes this field, so a compiled model of this engine never serves a stock engine, or vice versa.
    args.additional_config = {**(args.additional_config or {}), SECTION: config.to_mapping()}
    return True


def complete(config: VllmConfig) -> None:
    """Check and set the options that depend on the finished configuration.
    Raises :class:`ConfigError` for configurations that are not supported."""
    assert config.kv_transfer_config is not None and isinstance(config.additional_config, dict)
    if config.kv_transfer_config.kv_connector != CONNECTOR:
        config.kv_transfer_config = _with_ours(config.kv_transfer_config, config.additional_config[SECTION])
        # The connector has the size.  vLLM would name its own connector again when it makes a draft model's
        # configuration of this one.
        config.cache_config.kv_offloading_size = None
    if config.parallel_config.enable_elastic_ep:
        raise ConfigError(
            "--attention-backend hypic: --enable-elastic-ep: running workers do not join the passes in which "
            "added workers set up their layers; drop the flag, and add servers instead"
        )
    if config.use_v2_model_runner:
        raise ConfigError(
            "--attention-backend hypic needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError(
            "--attention-backend hypic: VLLM_USE_RUST_FRONTEND=1: vLLM's Rust front end reads no separators, "
            "parts or options of segments; unset the variable"
        )
    if config.model_config.runner_type != "generate":
        raise ConfigError(
            f"--attention-backend hypic: runner_type={config.model_config.runner_type!r}: expected 'generate'"
        )
    architecture = config.model_config.architecture
    if (keeps := NOT_SERVED.get(architecture)) is not None:
        raise ConfigError(f"--attention-backend hypic: {architecture} is not supported: it has {keeps}")
    if config.cache_config.kv_sharing_fast_prefill:
        raise ConfigError(
            "--attention-backend hypic: --kv-sharing-fast-prefill skips rows of segments; drop the flag"
        )
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and multimodal.video_pruning_rate:
        raise ConfigError(
            "--attention-backend hypic: --video-pruning-rate is not supported, as pruning moves positions in "
            "a pass; drop the option"
        )
    if config.model_config.enable_prompt_embeds and config_of(config).token_texts.literal:
        raise ConfigError(
            "--attention-backend hypic: --enable-prompt-embeds adds a token that texts must not spell while "
            "token_texts.literal is set: drop one of them"
        )
    _refuse_executors(config.parallel_config)
    _refuse_on_cuda(config)
    _look_at_drafting(config)
    use_tokenizer(config.model_config, config_of(config))
    _use_options(config, config_of(config).for_model(config.model_config))
    _take_what_is_signed_off(config)
    if config_of(config).segment_parallel is not None and config.parallel_config.data_parallel_size > 1:
        raise ConfigError(
            "hypic config: segment_parallel: data_parallel_size="
            f"{config.parallel_config.data_parallel_size}: expected 1, as all replicas would listen at one "
            "address; run one server per replica behind a router"
        )
    _look_at_gate(config)
    engine_interrupt.apply()
    engine_parent.apply(_give_time_to_end(config))


def complete_renderer(args: EngineArgs, model: ModelConfig) -> None:
    """Make the front end of ``vllm launch render --attention-backend hypic`` read primitives.

    Such a server creates a configuration of the model alone.  Arguments that :func:`choose` has completed
    belong to an engine, and their model stays unchanged here, as does the model of another backend.
    """
    if args.scheduler_cls == SCHEDULER or not _backend_is_hypic(args):
        return
    use_tokenizer(model, _config(args))
    logger.warning(
        "a prompt that is rendered here does not carry its messages to the engine, "
        "so hypic_segment_mode='structure' finds the segments of mode 'text' there; separators work"
    )


def _refuse_executors(parallel: ParallelConfig) -> None:
    """Raise :class:`ConfigError` for launchers of several ranks that cannot share records consistently."""
    backend = parallel.distributed_executor_backend
    if backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            "--attention-backend hypic: --distributed-executor-backend external_launcher gives every rank a "
            "scheduler of its own, and the schedulers would not agree on the cached records; use mp"
        )
    if backend == "ray" and parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "--attention-backend hypic: pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} with --distributed-executor-backend ray is not tested; use mp"
        )


def _look_at_drafting(config: VllmConfig) -> None:
    """Raise :class:`ConfigError` for unsupported speculative decoding; give draft models backend ``hypic``.
    vLLM chooses the attention backend of draft models separately."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    family = family_in(config.model_config.architecture)
    keeps_states = family is not None and family.drafts
    see_text_alike(config)
    on_cpu = current_platform.is_cpu()
    if (reason := refusal_of_drafts(config, keeps_states=keeps_states, on_cpu=on_cpu)) is not None:
        raise ConfigError(f"--attention-backend hypic: {reason}")
    speculative = config.speculative_config
    if speculative is not None and speculative.attention_backend is None:
        speculative.attention_backend = AttentionBackendEnum["HYPIC"]


def _refuse_on_cuda(config: VllmConfig) -> None:
    """Raise :class:`ConfigError` for models that the CUDA path cannot serve, before weights are read.
    Also chooses vLLM's kernel for prefills of Gated DeltaNet."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from ..backends.cuda_support import choose_gdn_prefill, refusal

    if (reason := refusal(config)) is not None:
        raise ConfigError(f"--attention-backend hypic: {reason}")
    choose_gdn_prefill(config)


def _backend_is_hypic(args: EngineArgs) -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend: Any = args.attention_backend
    if backend is None and args.attention_config is not None:
        backend = args.attention_config.backend
    other = class_of_another_plugin()
    if not isinstance(backend, str):  # HYPIC is an alias of CUSTOM, which the enum cannot tell apart
        return backend is AttentionBackendEnum.CUSTOM and other is None
    if backend.upper() == "HYPIC" and other is not None:
        raise ConfigError(
            f"--attention-backend hypic: another plugin has registered {other} as vLLM's custom backend: "
            "leave that plugin out of VLLM_PLUGINS"
        )
    return backend.upper() == "HYPIC"


def _config(args: EngineArgs) -> HypicConfig:
    options: dict[str, Any] = {}
    section = (args.additional_config or {}).get(SECTION, {})
    if not isinstance(section, dict):
        raise ConfigError(f"--additional-config: {SECTION}={redacted(repr(section))}: expected an object")
    options |= section
    options |= own_options(args.kv_transfer_config) or {}
    return HypicConfig.from_mapping(options)


def _use(field: str, args: EngineArgs, default: object, ours: str) -> None:
    """Set an option that the user left at ``default``; raise :class:`ConfigError` for another choice."""
    given = getattr(args, field)
    if given not in (default, ours):
        flag = "--" + field.replace("_", "-")
        raise ConfigError(f"--attention-backend hypic needs {flag} {ours}, got {given!r}")
    setattr(args, field, ours)


def _use_worker(args: EngineArgs) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _use("worker_cls", args, "auto", CPU_WORKER)
        # vLLM reads the model's configuration and module while it makes its own, so patches come first.
        bailing_config.apply()
        cpu_kimi_model.apply()
        cpu_kernel_overrides.apply()
        cpu_mla_blocks.apply()
    elif current_platform.is_cuda():
        _use("worker_cls", args, "auto", CUDA_WORKER)
        _use_v1_model_runner()
        if args.speculative_config is not None and args.async_scheduling is None:
            # With asynchronous scheduling, the host would not know how many drafts the last pass accepted.
            args.async_scheduling = False
    else:
        raise ConfigError(
            "--attention-backend hypic: expected the CPU or the CUDA platform, "
            f"got {current_platform.device_name!r}, which is not supported"
        )


def _use_v1_model_runner() -> None:
    """Choose vLLM's V1 model runner, unless the user set the environment variable, which is the only switch.

    vLLM reads the variable once the configuration is complete, and the engine's processes inherit it.  The
    variable therefore stays set in this process.  Engines without the plugin that this process starts later
    also run V1.
    """
    if envs.VLLM_USE_V2_MODEL_RUNNER is None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        logger.info("hypic sets VLLM_USE_V2_MODEL_RUNNER=0: vLLM's V2 model runner is not supported")


def use_tokenizer(model: ModelConfig, config: HypicConfig) -> None:
    """Switch a model to tokenizer mode ``hypic``, with the primitives' texts of ``config``.

    A model whose own mode must stay keeps that mode, if ``config`` names the primitives' token ids; otherwise
    raise :class:`ConfigError`.
    """
    from .tokenizer import publish_texts, refuses_model

    publish_texts(config.token_texts)
    if (reason := refuses_model(model)) is None:
        model.tokenizer_mode = TOKENIZER_MODE
    elif config.token_ids is None:
        raise ConfigError(f"--attention-backend hypic: {reason}")


def _take_what_is_signed_off(config: VllmConfig) -> None:
    """Set context and islands by the model's sign-offs, if the options ask for this choice."""
    options = config_of(config)
    if not options.gate.choose:
        return
    from ..eval.gate.startup import cheapest

    _use_options(config, cheapest(config, options))


def _use_options(config: VllmConfig, chosen: HypicConfig) -> None:
    """Put options into this configuration only; its engine arguments may serve another model later."""
    assert config.kv_transfer_config is not None and isinstance(config.additional_config, dict)
    options = chosen.to_mapping()
    config.kv_transfer_config = _with_ours(config.kv_transfer_config, options)
    config.additional_config = {**config.additional_config, SECTION: options}


def _look_at_gate(config: VllmConfig) -> None:
    """Check the model's gate before weights are read, so that a refusal does not take minutes."""
    from ..eval.gate.startup import look

    look(config, config_of(config))


def _give_time_to_end(config: VllmConfig) -> float:
    """Allow the engine time to end, and return that time in seconds.
    The store writes queued records and closes its tiers, for at most ``close_s`` seconds each."""
    store = config_of(config).store
    if not store.tiers:
        return engine_stop.STOCK_S
    store_s = 2 * store.close_s
    engine_stop.allow(store_s + TEARDOWN_S)
    # vLLM's only switch for an engine's wait for its workers is this variable, which processes inherit.
    if not envs.is_set("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = str(math.ceil(store_s + TEARDOWN_S / 2))
    return store_s + TEARDOWN_S


def _use_connector(args: EngineArgs, config: HypicConfig) -> None:
    """Set HypicConnector in ``args``, unless the user asks for other connectors.
    vLLM first makes its own configuration of other connectors; :func:`complete` then adds HypicConnector."""
    from vllm.config import KVTransferConfig

    transfer = args.kv_transfer_config
    named = None if transfer is None else transfer.kv_connector
    if args.kv_offloading_size is not None:
        # The option stands for a connector, which would replace the named connector.
        if named == CONNECTOR:
            args.kv_transfer_config = None
    elif transfer is None or named is None:
        args.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
    elif named == MULTI and not transfer.kv_connector_extra_config.get("connectors"):
        raise ConfigError(f"--kv-transfer-config: {MULTI} has no connectors: name some, or drop the flag")
    if (transfer := args.kv_transfer_config) is not None and transfer.kv_connector == CONNECTOR:
        transfer.kv_connector_extra_config = config.to_mapping()


def _with_ours(transfer: KVTransferConfig, options: dict[str, Any]) -> KVTransferConfig:
    """Return ``transfer`` with HypicConnector as the first connector, which gets ``options``."""
    if transfer.kv_connector == CONNECTOR:
        return replace(transfer, kv_connector_extra_config=options)
    if transfer.kv_connector == MULTI:
        named = transfer.kv_connector_extra_config["connectors"]
        others = [c for c in named if c.get("kv_connector") != CONNECTOR]
    else:
        others = [{f.name: getattr(transfer, f.name) for f in fields(transfer) if f.name != "engine_id"}]
    ours = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": options}
    return replace(
        transfer,
        kv_connector=MULTI,
        kv_connector_module_path="vllm_hypic.connector.multi_connector",
        kv_connector_extra_config={"connectors": [ours, *others]},
    )
