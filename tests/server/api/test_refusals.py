"""What stops the engine at start-up, with the reason and the way out."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from benchmarks.lib.serving import Server, ServerError
from vllm_hypic import register
from vllm_hypic.config.drafting import refusal, see_text_alike
from vllm_hypic.config.engine import TOKENIZER_MODE, config_of
from vllm_hypic.connector.multi_connector import MultiConnector
from vllm_hypic.engine.activation import CONNECTOR, CPU_WORKER, SCHEDULER, choose, complete
from vllm_hypic.engine.drafter import ComposingDrafter
from vllm_hypic.errors import ConfigError
from vllm_hypic.harness.generators import EXAMPLE
from vllm_hypic.patches import backend_name

from .conftest import ENV

MODEL = str(EXAMPLE / "model")


def arguments(**options: Any) -> EngineArgs:
    register()
    return EngineArgs(model=MODEL, **{"attention_backend": "hypic", **options})


def hypic(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"hypic": options}}


REFUSALS = {
    "unknown option": (hypic(seem_tokens=4), "unknown option 'seem_tokens'; expected one of"),
    "damaged section": ({"additional_config": {"hypic": 7}}, "hypic=7: expected an object"),
    "bad type": (hypic(page_tokens="64"), "page_tokens='64': expected an integer >= 1"),
    "bad range": (hypic(pool_fraction=1.5), "pool_fraction=1.5: expected a number between 0 and 1"),
    "unknown link": (hypic(link="magic"), "hypic config: link='magic': expected one of"),
    "negative seam": (hypic(seam_tokens=-3), "hypic config: seam_tokens=-3: expected an integer from 0 to"),
    "damaged tokens": (
        hypic(token_texts={"separator": "x"}),
        "unknown name 'separator'; expected sep, pdep, pad",
    ),
    "empty separator": (hypic(token_texts={"sep": ""}), "sep='': expected a non-empty string"),
    "MultiConnector without connectors": (
        {"kv_transfer_config": KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")},
        "MultiConnector has no connectors: name some, or drop the flag",
    ),
    "another worker": ({"worker_cls": "my.Worker"}, f"needs --worker-cls {CPU_WORKER}, got 'my.Worker'"),
    "another scheduler": ({"scheduler_cls": "my.Scheduler"}, f"needs --scheduler-cls {SCHEDULER}"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_way_out(case):
    options, reason = REFUSALS[case]
    with pytest.raises(ConfigError) as refused:
        choose(arguments(**options))
    assert reason in str(refused.value)


def test_drafts_of_a_model_with_a_gated_delta_net_are_served():
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    config = arguments(speculative_config=drafts).create_engine_config()
    assert config.model_config.is_hybrid and config.speculative_config.num_speculative_tokens == 2


def test_the_name_of_the_backend_switches_everything_on():
    args = arguments()
    assert choose(args) and args.scheduler_cls == SCHEDULER and args.worker_cls == CPU_WORKER
    # In vLLM's hash of compiled models, so that they differ from a stock engine's.
    assert args.additional_config["hypic"]["link"] == "hypic"
    assert args.kv_transfer_config.kv_connector == CONNECTOR
    assert choose(args), "a second time changes nothing"
    # Other backends are left alone.
    args = arguments(attention_backend=None)
    assert not choose(args)
    assert args.scheduler_cls is None and args.worker_cls == "auto" and args.kv_transfer_config is None


def test_a_custom_backend_of_another_plugin_stays_its_own():
    custom, theirs = AttentionBackendEnum.CUSTOM, "another.plugin.Backend"
    try:
        register_backend(custom, theirs)
        backend_name.apply()
        assert custom.get_path() == theirs
        assert not choose(arguments(attention_backend=custom))
        with pytest.raises(ConfigError, match=f"another plugin has registered {theirs}"):
            choose(arguments())
    finally:
        custom.clear_override()
        backend_name.apply()
    assert custom.get_path() == backend_name.BACKEND and choose(arguments(attention_backend=custom))


def test_an_explicit_connector_config_wins():
    extra = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": {"seam_tokens": 4}}
    args = arguments(**hypic(seam_tokens=12, page_tokens=32), kv_transfer_config=KVTransferConfig(**extra))
    assert choose(args)
    chosen = args.kv_transfer_config.kv_connector_extra_config
    assert (chosen["seam_tokens"], chosen["page_tokens"]) == (4, 32)


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
OURS = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": {"page_tokens": 32}}
SEVERAL = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"} | {
    "kv_connector_extra_config": {"connectors": [NIXL, OURS, OFFLOADING]}
}
BESIDE = {
    "one": (NIXL, {}, 64, ["NixlConnector"]),
    "several": (SEVERAL, {}, 32, ["NixlConnector", "OffloadingConnector"]),
    "offloading": (None, {"kv_offloading_size": 1.0}, 64, ["OffloadingConnector"]),
    "offloading instead of a named one": (
        {"kv_connector": CONNECTOR, "kv_role": "kv_both"},
        {"kv_offloading_size": 1.0},
        64,
        ["OffloadingConnector"],
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_other_connectors_stand_behind_ours(case):
    connector, options, page_tokens, others = BESIDE[case]
    if connector is not None:
        options = {**options, "kv_transfer_config": KVTransferConfig(**connector)}
    config = arguments(**options, seed=0).create_engine_config()
    transfer = config.kv_transfer_config
    ours, *found = transfer.kv_connector_extra_config["connectors"]
    assert transfer.kv_connector == "MultiConnector" and transfer.has_connector(CONNECTOR)
    assert ours["kv_connector"] == CONNECTOR and config_of(config).page_tokens == page_tokens
    assert [c["kv_connector"] for c in found] == others
    consumes = "NixlConnector" in others
    assert transfer.kv_role == ("kv_consumer" if consumes else "kv_both")
    assert found[0]["kv_role"] == transfer.kv_role
    config._post_init_kv_transfer_config()  # as vLLM does again for the configuration of a draft model
    assert config.kv_transfer_config.kv_connector == "MultiConnector"
    connector = KVConnectorFactory.get_connector_class(transfer)
    assert issubclass(connector, MultiConnector) and KVConnectorFactory.supports_hma_config(transfer)


def test_workers_are_not_added_while_others_serve():
    config = arguments().create_engine_config()
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ConfigError, match="--enable-elastic-ep: running workers do not join"):
        complete(config)


def test_pruned_videos_are_refused_on_every_platform():
    config = arguments().create_engine_config()
    config.model_config.multimodal_config = SimpleNamespace(video_pruning_rate=0.5)
    with pytest.raises(ConfigError, match="--video-pruning-rate is not supported"):
        complete(config)


def test_prompt_embeds_are_refused_beside_literal_texts():
    with pytest.raises(ConfigError, match="--enable-prompt-embeds adds a token"):
        arguments(enable_prompt_embeds=True, **hypic(token_texts={"literal": True})).create_engine_config()


def test_the_front_end_is_vllms_python_one(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(
        ConfigError, match="VLLM_USE_RUST_FRONTEND=1: vLLM's Rust front end reads no separators"
    ):
        arguments().create_engine_config()


@pytest.mark.parametrize(("backend", "mode"), [("hypic", TOKENIZER_MODE), (None, "auto")])
def test_a_rendering_server_reads_primitives(backend, mode):
    assert arguments(attention_backend=backend).create_model_config().tokenizer_mode == mode


@pytest.mark.engine
def test_the_server_ends_with_the_reason(tmp_path):
    options = ("--attention-backend", "hypic", "--additional-config", '{"hypic": {"seem_tokens": 4}}')
    server = Server(MODEL, *options, env=ENV, log=tmp_path / "server.log")
    begin = time.monotonic()
    with pytest.raises(ServerError) as ended, server:
        pass
    assert "unknown option 'seem_tokens'; expected one of" in str(ended.value)
    assert "exit code" in str(ended.value) and time.monotonic() - begin < 120
    assert not server.processes()


def drafting(**given: Any) -> SimpleNamespace:
    """A configuration as far as it says how an engine drafts; ``given``: what differs from a model of full
    attention that drafts for another."""
    layers = {"is_hybrid": False, "is_attention_free": False, "use_mla": False, "uses_mrope": False}
    model = {**layers, "max_model_len": 4096, "architecture": "Model", "model": "path"}
    how = {"method": "draft_model", "parallel_drafting": False, "disable_padded_drafter_batch": False}
    of = {"model": {}, "draft": {}, "how": {}, "stages": 1} | given
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | of["model"]),
        parallel_config=SimpleNamespace(pipeline_parallel_size=of["stages"]),
        speculative_config=SimpleNamespace(
            **how | of["how"], draft_model_config=SimpleNamespace(**model | of["draft"])
        ),
    )


DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"how": {"method": "medusa"}}, "by 'medusa' is not tested with records"),
    "linear layers": ({"model": {"is_hybrid": True}}, "state behind each draft"),
    "linear layers alone": ({"model": {"is_attention_free": True}}, "state behind each draft"),
    "latents": ({"model": {"use_mla": True}}, "latent attention gives wrong answers on CPUs"),
    "drafting in parallel": ({"how": {"parallel_drafting": True}}, "parallel_drafting is not supported"),
    "rows left out": ({"how": {"disable_padded_drafter_batch": True}}, "disable_padded_drafter_batch"),
    "three positions": ({"model": {"uses_mrope": True}}, "M-RoPE is not supported"),
    "three positions of what drafts": ({"draft": {"uses_mrope": True}}, "M-RoPE is not supported"),
    "another head of the model": (
        {"how": {"method": "mtp"}, "draft": {"architecture": "NemotronHMTPModel"}},
        "NemotronHMTPModel is not tested: expected one of Qwen3_5MTP",
    ),
    "stages": ({"stages": 2}, "pipeline_parallel_size=2: vLLM's V1 model runner loads the drafter on"),
    "a hybrid drafts": ({"draft": {"is_hybrid": True}}, "expected a draft model with full attention"),
    "positions end": ({"draft": {"max_model_len": 2048}}, "max_model_len=2048: expected 4096 or more"),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_drafts_that_are_not_served(case):
    given, reason = DRAFTS[case]
    assert reason in (refusal(drafting(**given)) or "")


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
@pytest.mark.parametrize(
    ("architecture", "served"),
    [
        ("FalconH1ForCausalLM", ("draft_model", "eagle")),
        ("Qwen3_5ForCausalLM", ("draft_model",)),
        ("Model", ()),
    ],
)
def test_models_that_draft_beside_linear_layers(architecture: str, served: tuple[str, ...], method: str):
    asked = drafting(how={"method": method}, model={"is_hybrid": True, "architecture": architecture})
    reason = refusal(asked, keeps_states=True)
    assert (reason is None) == (method in served)
    expected = f"expected one of {', '.join(('ngram', 'suffix', 'mtp', *served))} (with linear layers, other"
    assert reason is None or expected in reason


def test_a_draft_model_in_several_groups_is_refused():
    drafter = ComposingDrafter()
    drafter._draft_attn_layer_names = {"draft.0", "draft.1"}
    drafter.speculative_config = SimpleNamespace(method="draft_model", model="path")
    names = (["model.0", "draft.0"], ["draft.1"], ["model.1"])
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=of) for of in names])
    with pytest.raises(ConfigError, match="the 2 attention layers of path lie in 2 KV cache groups"):
        drafter.validate_same_kv_cache_group(groups)


def test_drafts_that_are_served():
    for method in ("draft_model", "eagle", "eagle3", "ngram", "suffix"):
        assert refusal(drafting(how={"method": method})) is None
    for method in ("ngram", "suffix"):
        assert refusal(drafting(how={"method": method}, model={"is_hybrid": True}), keeps_states=True) is None
    assert refusal(drafting(how={"method": "ngram"}, model={"uses_mrope": True})) is None
    head = {"architecture": "Qwen3_5MTP", "uses_mrope": True}
    own = drafting(how={"method": "mtp"}, model={"is_hybrid": True, "uses_mrope": True}, draft=head)
    assert refusal(own, keeps_states=True) is None


@pytest.mark.parametrize(("of_model", "left"), [({}, set()), ({"mrope_section"}, {"mrope_section"})])
def test_a_head_has_the_positions_of_its_model(of_model, left):
    fields = SimpleNamespace(rope_parameters={"mrope_section": [2, 3, 3], "rope_theta": 1e4})
    config = drafting(
        how={"method": "mtp"},
        model={"uses_mrope": bool(of_model)},
        draft={"hf_config": fields, "hf_text_config": fields},
    )
    see_text_alike(config)
    assert set(fields.rope_parameters) == {"rope_theta"} | left
