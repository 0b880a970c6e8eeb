"""Serves a hybrid model through the GPU model runner's code on the CPU; a program for Triton's interpreter.

vLLM's CPU worker and its shims stand for the device.  Above them run, as on a GPU: our GPU model runner, the
CUDA attention implementation and its metadata builder, the CUDA layer of gated delta nets, all plans and
Triton operators.  FlashAttention, what writes vLLM's cache, and stock's recurrence are stand-ins in PyTorch.

    TRITON_INTERPRET=1 python gpu_runner.py MODEL SEPARATOR [FAULT]

Prints, as a line of JSON, each answer's tokens, logprobs of the first token by id, and cached tokens; and how
often each stage ran each operator.
"""

import functools
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / name) for name in ("triton", "driven")]

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.forward_context import get_forward_context  # noqa: E402


def pretend(fault: str = "") -> None:
    """From now on engines of this process are made of the CUDA path's parts."""
    import interpreter
    from attention_world import stand_in
    from vllm.v1.attention.backends import flash_attn

    from vllm_hypic.backends.attention.cuda import HypicCUDAAttentionBackend
    from vllm_hypic.backends.linear import gdn
    from vllm_hypic.connector.worker import connector as worker_half
    from vllm_hypic.engine import cpu_worker
    from vllm_hypic.patches import cuda_kept_lse
    from vllm_hypic.pool import tensors
    from vllm_hypic.pool.copy import stream

    interpreter.install()
    chosen = types.ModuleType("vllm_hypic.backends.attention.backend")
    chosen.HypicAttentionBackend = HypicCUDAAttentionBackend  # type: ignore[attr-defined]
    chosen.HypicAttentionImpl = HypicCUDAAttentionBackend.get_impl_cls()  # type: ignore[attr-defined]
    sys.modules[chosen.__name__] = chosen
    flash_attn.get_flash_attn_version = lambda *_, **__: 2
    flash_attn.flash_attn_varlen_func = stand_in
    cuda_kept_lse.apply()
    flash_attn.reshape_and_cache_flash = write_cache
    layer = delta_net()
    gdn._layer_class = lambda cuda: layer
    cpu_worker.HypicCPUModelRunner = model_runner(fault)  # type: ignore[misc]
    # Records are settled one pass later, and their transition blocks stand in one table.
    late = stream.CPUSideStream()
    late.behind = True
    worker_half.side_stream_of = lambda device: late
    tensors.TransitionBlocks = functools.partial(tensors.TransitionBlocks, joint=True)  # type: ignore


def model_runner(fault: str) -> type:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from vllm_hypic.engine.cuda_worker import HypicGPUModelRunner

    class Runner(HypicGPUModelRunner, CPUModelRunner):
        """The GPU model runner over vLLM's shims."""

        def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
            # The GPU worker has run the model by now, when later stages make room for what they are sent; the
            # CPU worker leaves that out of eager engines.
            if not get_pp_group().is_first_rank:
                with set_current_vllm_config(self.vllm_config):
                    self.profile_run()
            super().initialize_kv_cache(*args, **kwargs)

        def _rewrite_positions(self, step: Any) -> None:
            if fault != "positions" or not get_pp_group().is_last_rank:
                super()._rewrite_positions(step)

    return Runner


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *_: object,
) -> None:
    """``reshape_and_cache_flash``: caches ``[blocks, block_size, heads, size]``; -1 is padding."""
    rows = (slot_mapping >= 0).nonzero()[:, 0]
    block, at = slot_mapping[rows] // key_cache.shape[1], slot_mapping[rows] % key_cache.shape[1]
    key_cache[block, at], value_cache[block, at] = key[rows], value[rows]


def delta_net() -> type:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    from vllm_hypic.backends.linear.gdn.cuda import HypicCUDAGatedDeltaNet

    class Layer(HypicCUDAGatedDeltaNet):
        """Runs on the CPU as it would on a GPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._forward_method = self.forward_cuda

    QwenGatedDeltaNetAttention._forward_core = stock_core  # type: ignore[method-assign]
    return Layer


def stock_core(layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """What vLLM computes for the batch that the metadata describes."""
    from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, eager
    from vllm_hypic.backends.ops.program import ordinary
    from vllm_hypic.engine.worker import worker_connector

    metadata = get_forward_context().attn_metadata
    if metadata is None:  # vLLM's profile run
        return
    m = metadata[layer.prefix]
    requests = m.num_decodes + m.num_prefills
    bounds = m.non_spec_query_start_loc[: requests + 1].tolist()
    assert bounds[-1] == m.num_actual_tokens
    resumed = [True] * requests if m.has_initial_state is None else m.has_initial_state.tolist()
    caches = layer._current_views().caches(m.non_spec_state_indices_tensor[:requests].contiguous())
    x, records = GatedDeltaInputs(mixed, a, b), layer.records(worker_connector().runtime)
    eager.gdn_compose(x, layer.weights(), caches, out, records, *ordinary(bounds, resumed))


def parts() -> list[list[list[int]]]:
    """Lead, two documents and query of two prompts: the documents in two orders, so that each is composed at
    two places."""
    gen = torch.Generator().manual_seed(5)
    lead, one, two, query = (torch.randint(5, 480, (n,), generator=gen).tolist() for n in (20, 60, 52, 9))
    return [[lead, one, two, query], [lead, two, one, query]]


def prompts(*between: int) -> list[list[int]]:
    """The same as tokens, with ``between`` between two parts."""
    return [[t for i, part in enumerate(p) for t in (*(between if i else ()), *part)] for p in parts()]


def start(model: str, **more: Any) -> LLM:
    """An engine over ``model``."""
    options = {
        "page_tokens": 32,
        "pool_bytes": 16 << 20,
        "context": "none",
        "islands": "none",
        "expected_segment_tokens": 64,
        # So that a head in the second half of the layers is dead.
        "dead_transition": 1e-6,
    }
    usual = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_logprobs=-1,
        seed=0,
        attention_backend="hypic",
        additional_config={"hypic": options},
        **usual | more,
    )


def answers(llm: LLM, separator: int) -> list[list[Any]]:
    """To the composed prompts, cold one by one, then warm with plain requests beside, in one batch: tokens,
    logprobs of the first one by id, cached tokens."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=-1, ignore_eos=True, detokenize=False)
    found: list[list[Any]] = []
    composed, plain = prompts(separator), prompts()
    for batch in (*([p] for p in composed), [*composed, *plain]):
        given = [{"prompt_token_ids": tokens} for tokens in batch]
        for output in llm.generate(given, sampling, use_tqdm=False):
            [sample] = output.outputs
            first = [entry.logprob for _, entry in sorted(sample.logprobs[0].items())]
            found.append([list(sample.token_ids), first, output.num_cached_tokens])
    return found


def main() -> None:
    model, separator, *fault = sys.argv[1:]
    pretend(*fault)
    llm = start(model)
    found = answers(llm, int(separator))
    print(json.dumps([found, llm.collective_rpc("hypic_calls")]))


if __name__ == "__main__":
    main()
