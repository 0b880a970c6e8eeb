"""Which operator belongs to which stage of a forward pass: a table to extend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from .engine_calls import Operator


class Stage(Enum):
    """Stages of the time to a first token, in the order they are shown."""

    PROJECTIONS = "projections"
    PUBLIC_ATTENTION = "attention to cached segments"
    PRIVATE_ATTENTION = "attention to the stream (stock)"
    DELTA_RULE = "delta rule: seams, compose, capture"
    STOCK_LINEAR = "linear attention (stock)"
    CONVOLUTION = "convolution"
    ELEMENTWISE = "elementwise, norms, rotary"
    COPIES = "copies and index"
    SAMPLING = "sampling"
    OTHER = "other operators"
    PYTHON_IN_LAYERS = "Python in the layers"
    PYTHON = "Python and scheduler"


MATRIX_PRODUCTS_AND_ATTENTION = (
    Stage.PROJECTIONS,
    Stage.PUBLIC_ATTENTION,
    Stage.PRIVATE_ATTENTION,
    Stage.DELTA_RULE,
    Stage.STOCK_LINEAR,
)
"""What a first token should be spent in."""


@dataclass(frozen=True)
class Rule:
    """Operators whose name begins with a match of ``name``, called (directly or not) by a custom operator
    whose name begins with a match of ``inside``; ``None``: wherever."""

    stage: Stage
    name: str
    inside: str | None = None

    def takes(self, operator: Operator) -> bool:
        return re.match(self.name, operator.name) is not None and (
            self.inside is None or re.match(self.inside, operator.inside) is not None
        )


PRODUCT = (
    r"(aten::(mm|bmm|addmm|baddbmm|addbmm|linear|matmul|_?scaled_mm|dot|mv|addmv|einsum)_?$|mkldnn::|onednn)"
)
GDN = r"vllm::(hypic_)?\w*gdn"
ATTENTION = r"vllm::unified_attention"
COPY = (
    r"aten::(copy_|cat|stack|index|_?index_\w+|gather|scatter|slice_scatter|clone|contiguous|_to_copy|to$|take|"
    r"repeat|masked_select|pad|constant_pad|roll|flip|nonzero|empty|new_|zeros|zero_|fill_|full|arange|"
    r"as_strided|view|reshape|_reshape|select|slice|narrow|expand|transpose|permute|t$|unsqueeze|squeeze|split|"
    r"unflatten|flatten|unbind|chunk|alias|detach|lift|resize|set_|item|_local_scalar)"
)

RULES: tuple[Rule, ...] = (
    # Our C++ operators, by what their names say.
    Rule(Stage.CONVOLUTION, r"vllm_hypic::\w*conv"),
    Rule(Stage.PUBLIC_ATTENTION, r"vllm_hypic::\w*(span|attention|attn|join|rotate|rope)"),
    Rule(Stage.DELTA_RULE, r"vllm_hypic::\w*(gdn|delta|compose|capture|seam|summar|transition|state)"),
    Rule(Stage.COPIES, r"vllm_hypic::\w*(copy|gather|page|write|store)"),
    # vLLM's kernels.
    Rule(Stage.PRIVATE_ATTENTION, r"_C::cpu_att"),
    Rule(Stage.STOCK_LINEAR, r"_C::\w*(gated_delta|gdn|recurrent|ssm|mamba)"),
    Rule(Stage.CONVOLUTION, r"_C::\w*conv"),
    Rule(Stage.PROJECTIONS, r"_C::\w*(onednn|linear|gemm|_mm|matmul|scaled_mm)"),
    Rule(Stage.ELEMENTWISE, r"_C::\w*(rotary|norm|silu|gelu|act|add|mul)"),
    Rule(Stage.COPIES, r"_C::\w*(cache|copy)"),
    # The PyTorch path: what an operator is for depends on who called it.
    Rule(
        Stage.PUBLIC_ATTENTION, r"aten::_?scaled_dot_product|aten::_flash_attention|aten::_softmax", ATTENTION
    ),
    Rule(Stage.PUBLIC_ATTENTION, PRODUCT, ATTENTION),
    Rule(Stage.DELTA_RULE, PRODUCT, GDN),
    Rule(Stage.DELTA_RULE, r"aten::(linalg_|triangular_solve|_?solve|inverse|tril|triu)", GDN),
    Rule(Stage.CONVOLUTION, r"aten::\w*conv|mkldnn::\w*conv"),
    Rule(Stage.PROJECTIONS, PRODUCT),
    Rule(Stage.SAMPLING, r"aten::(topk|argmax|log_softmax|_log_softmax|sort|multinomial|argsort)"),
    # What is left of our own and vLLM's operators when the operators they call are taken off.
    Rule(Stage.PYTHON_IN_LAYERS, r"vllm::(hypic|unified|\w*gdn|\w*attention)"),
    Rule(Stage.ELEMENTWISE, r"## Call CompiledFxGraph|Torch-Compiled Region|(graph_\d+_)?cpp_fused|triton_"),
    Rule(Stage.PYTHON, r"TorchDynamo|Pregraph|ProfilerStep|PythonSubclass|\[pytorch|cudagraph|autograd"),
    Rule(Stage.COPIES, COPY),
    Rule(Stage.ELEMENTWISE, r"aten::"),
)
"""The first rule that takes an operator decides."""


def stage_of(operator: Operator) -> Stage:
    return next((rule.stage for rule in RULES if rule.takes(operator)), Stage.OTHER)


def by_stage(operators: Iterable[Operator], wall_s: float) -> dict[Stage, float]:
    """Seconds per stage; ``PYTHON`` is what is left of ``wall_s``, and has the little that profiles of
    compiled models name as such."""
    seconds = dict.fromkeys(Stage, 0.0)
    for operator in operators:
        stage = stage_of(operator)
        if stage is not Stage.PYTHON:
            seconds[stage] += operator.self_s
    seconds[Stage.PYTHON] = max(0.0, wall_s - sum(seconds.values()))
    return seconds
