"""Operators by stage of the forward pass."""

import pytest

from benchmarks.engine_calls import Operator, Profile
from benchmarks.profile import mean_operators
from benchmarks.stages import Stage, by_stage, stage_of

GDN, ATTENTION = "vllm::hypic_gdn_attention_core", "vllm::unified_attention_with_output"


@pytest.mark.parametrize(
    ("name", "inside", "stage"),
    [
        ("_C::onednn_mm", "", Stage.PROJECTIONS),
        ("aten::mm", "", Stage.PROJECTIONS),
        ("aten::addmm", "", Stage.PROJECTIONS),
        ("mkldnn::_linear_pointwise", "", Stage.PROJECTIONS),
        ("vllm_hypic::span_attention", ATTENTION, Stage.PUBLIC_ATTENTION),
        ("vllm_hypic::join_", ATTENTION, Stage.PUBLIC_ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION, Stage.PUBLIC_ATTENTION),
        ("aten::bmm", ATTENTION, Stage.PUBLIC_ATTENTION),
        ("_C::cpu_attention_with_kv_cache", ATTENTION, Stage.PRIVATE_ATTENTION),
        ("vllm_hypic::gdn_segments", GDN, Stage.DELTA_RULE),
        ("vllm_hypic::gdn_compose", GDN, Stage.DELTA_RULE),
        ("aten::baddbmm_", GDN, Stage.DELTA_RULE),
        ("aten::linalg_solve_triangular", GDN, Stage.DELTA_RULE),
        ("_C::chunk_gated_delta_rule_cpu", GDN, Stage.STOCK_LINEAR),
        ("_C::fused_gdn_gating_cpu", GDN, Stage.STOCK_LINEAR),
        ("_C::causal_conv1d_fwd_cpu", GDN, Stage.CONVOLUTION),
        ("vllm_hypic::conv_tail", GDN, Stage.CONVOLUTION),
        ("aten::mul", "", Stage.ELEMENTWISE),
        ("_C::rotary_embedding", "", Stage.ELEMENTWISE),
        ("## Call CompiledFxGraph f42xxyz ##", "", Stage.ELEMENTWISE),
        ("aten::copy_", GDN, Stage.COPIES),
        ("aten::index_select", ATTENTION, Stage.COPIES),
        ("_C::cpu_attn_reshape_and_cache", "vllm::unified_kv_cache_update", Stage.PRIVATE_ATTENTION),
        ("aten::topk", "", Stage.SAMPLING),
        # Without the operators they call, these two are Python.
        (GDN, "", Stage.PYTHON_IN_LAYERS),
        (ATTENTION, "", Stage.PYTHON_IN_LAYERS),
        ("TorchDynamo Cache Lookup", "", Stage.PYTHON),
        ("somebody::else", "", Stage.OTHER),
    ],
)
def test_stage_of(name: str, inside: str, stage: Stage) -> None:
    assert stage_of(Operator(name, inside, 1.0, 1)) is stage


def test_what_no_operator_explains_is_python() -> None:
    seconds = {"aten::mm": 0.5, "aten::mul": 0.25, "TorchDynamo Cache Lookup": 0.05}
    times = by_stage([Operator(name, "", s, 1) for name, s in seconds.items()], 1.0)
    assert times[Stage.PYTHON] == pytest.approx(0.25)
    assert sum(times.values()) == pytest.approx(1.0)


def test_operators_of_several_requests_are_averaged() -> None:
    profiles = [
        Profile(1.0, [Operator("aten::mm", "", s, 4), Operator("aten::bmm", GDN, 10.0, 2)], None)  # type: ignore[arg-type]
        for s in (1.0, 3.0)
    ]
    assert mean_operators(profiles) == [Operator("aten::bmm", GDN, 10.0, 2), Operator("aten::mm", "", 2.0, 4)]
