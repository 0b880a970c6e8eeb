"""What processes with engines share: a fork server imports this module once, and no start pays for it again.

Our modules register nothing when they are imported, so a stock engine's process may have them; and vLLM
replaces the kernels of Triton by the same ones in every process.  Where the CPU has no instructions for
bfloat16, matrix products of all engines, stock or not, go through float32: that takes a tenth of the time.
"""

import gc
import importlib
import multiprocessing
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_5.modeling_qwen3_5  # noqa: F401
import vllm.entrypoints.llm
import vllm.model_executor.models.qwen3_5
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.distributed.elastic_ep import elastic_execute  # noqa: F401
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector  # noqa: F401
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

import vllm_hypic.backends.attention
import vllm_hypic.backends.linear
import vllm_hypic.connector.connector
import vllm_hypic.engine.cpu_worker
import vllm_hypic.engine.scheduler
import vllm_hypic.engine.tokenizer
import vllm_hypic.eval.gate.startup
from benchmarks.lib.serving import fast_dtype

for package in (vllm_hypic.backends.attention, vllm_hypic.backends.linear):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(found.name)


_in_a_subprocess = registry._run_in_subprocess


def _in_a_fork(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a process of its own, as vLLM does to look at a model's class: 0.1 s and not 10."""
    if multiprocessing.current_process().daemon:  # it may have no children of this kind
        return _in_a_subprocess(function)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function()))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


registry._run_in_subprocess = _in_a_fork


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded to the type of ``x`` at the end alone."""
    product = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)


_dispatch = layers.dispatch_cpu_unquantized_gemm


def _through_float32(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Choose how a linear layer multiplies, as vLLM does, but for bfloat16."""
    _dispatch(layer, remove_weight)
    if layer.weight.dtype is torch.bfloat16 and layer.weight.ndim == 2 and not layer.weight.is_meta:
        layer.cpu_linear = _product


if fast_dtype() == "float32":
    layers.dispatch_cpu_unquantized_gemm = _through_float32
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)

# Engines collect garbage several times as they start: what is imported stays, and need not be looked at.
gc.collect()
gc.freeze()
