"""Patches of vLLM: each fits the installed version, may be applied again, and fails loudly otherwise."""

import subprocess
import sys

import pytest
import torch
from lib import forked

from vllm_hypic.patches.signature import PatchError, require_parameters

BEGINNING = """
import torch
import vllm._custom_ops

told = "vLLM or transformers has mended it: drop the patch"

def fails(call, kind, says=""):
    try:
        call()
    except kind as error:
        return says in str(error)
    return False
"""
SCRIPTS = {
    "applied-twice": """
import importlib, pkgutil
import vllm_hypic
from vllm_hypic import patches

OTHERS = {"signature", "engine_parent", "cpu_seeded_chunks", "cuda_kept_lse"}
names = {module.name for module in pkgutil.iter_modules(patches.__path__)} - OTHERS
assert len(names) >= 29
for name in 2 * sorted(names):
    importlib.import_module(f"vllm_hypic.patches.{name}").apply()
importlib.import_module("vllm_hypic.patches.engine_parent").apply(1.0)
importlib.import_module("vllm_hypic.patches.engine_parent").apply(2.0)

import pickle
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert pickle.loads(pickle.dumps(AttentionBackendEnum["HYPIC"])) is AttentionBackendEnum["HYPIC"]
assert AttentionBackendEnum["HYPIC"].get_class().get_name() == "HYPIC"
""",
    "block-copies": """
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker import gpu_model_runner as runner
from vllm_hypic.patches import block_copies

def copied():
    memory = torch.arange(2 * 4 * 8)  # two tensors of four blocks of eight numbers
    block = memory[:32].view(4, 8)
    states = block[:, :3]
    runner.copy_kv_cache_blocks_inplace([states, block, memory[32:].view(4, 8)], 4, [KVCacheBlockCopy(1, 3)])
    return [memory[n:n + 32].view(4, 8)[3].tolist() for n in (0, 32)]

right = [list(range(8, 16)), list(range(40, 48))]
assert copied() != right, told
block_copies.apply()
assert copied() == right
""",
    "one-token-conv": """
from vllm.platforms import current_platform
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm_hypic.patches import cpu_one_token_conv

cpu_one_token_conv.apply()
wide = torch.randn(1, 400, dtype=torch.bfloat16)[:, :256]  # a row of a wider matrix, as the layer passes it
weight = torch.randn(256, 4, dtype=torch.bfloat16)
states = torch.randn(3, 3, 256, dtype=torch.bfloat16)
before = states.clone()
out = gdn_attention._causal_conv1d_fwd_cpu(
    x=wide.transpose(0, 1), weight=weight, bias=None, conv_states=states.transpose(1, 2),
    query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
    cache_indices=torch.tensor([1], dtype=torch.int32),
    has_initial_state=torch.tensor([True]), silu_activation=False, is_weight_packed=False)
window = torch.cat([before[1], wide]).float()
truth = (window * weight.t().float()).sum(0)
assert torch.allclose(out[:, 0].float(), truth, rtol=2e-2, atol=2e-2)
assert torch.equal(states[1], torch.cat([before[1][1:], wide]))
""",
    "draft-sampling": """
from vllm.v1.sample import rejection_sampler
from vllm_hypic.patches import cpu_draft_sampling

cpu_draft_sampling.apply()
ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)  # the second request has no drafts
for dtype in (torch.float32, torch.int32, torch.int64):
    options = torch.tensor([3, 4, 0, 7]).to(dtype) / (2 if dtype.is_floating_point else 1)
    spread = rejection_sampler.expand_batch_to_tokens(options.to(dtype), ends, 6, 0, 1)
    a, _, _, d = options.tolist()
    assert spread.dtype == dtype and spread.tolist() == [a, a, 1, 1, 1, d], spread
""",
    "rope-by-heads": """
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm_hypic.patches import cpu_rope_heads

def rotated(rope, flat):
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    given = (q.flatten(1), k.flatten(1)) if flat else (q, k)
    return torch.cat([t.flatten(1) for t in rope.forward_cpu(torch.arange(5) * 7, *given)], 1)

with set_current_vllm_config(VllmConfig()):
    rope = RotaryEmbedding(64, 64, 256, 10000.0, True, torch.float32)
flat = rotated(rope, flat=True)
assert (rotated(rope, flat=False) - flat).abs().max() > 1, told
cpu_rope_heads.apply()
assert torch.equal(rotated(rope, flat=True), flat)
assert (rotated(rope, flat=False) - flat).abs().max() < 1e-5
""",
    "mamba2-checkpoints": """
from types import SimpleNamespace
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen
from vllm_hypic.patches import cpu_mamba2_checkpoints

def states(asked):
    x, dt, B = torch.randn(9, 2, 16), torch.randn(9, 2), torch.randn(9, 1, 16)
    ends = torch.tensor([0, 4, 8, 9], dtype=torch.int32)
    return mamba_chunk_scan_combined_varlen(
        x, dt, -torch.ones(2), B, B, 4, torch.tensor([0, 9], dtype=torch.int32), ends,
        torch.tensor([2]), torch.zeros(3, dtype=torch.int32), torch.empty_like(x), dt_softplus=True,
        return_intermediate_states=asked)

assert len(states(True)) == len(states(False)) == 1, told

def promised():
    layer = MambaMixer2.__new__(MambaMixer2)
    torch.nn.Module.__init__(layer)
    layer.get_state_shape = lambda: ((3, 64), (2, 16, 16))
    layer.get_state_dtype = lambda: (torch.float32, torch.float32)
    cache = SimpleNamespace(mamba_block_size=64, mamba_page_size_padded=None, mamba_cache_mode="align",
                            use_replayssm=False)
    spec = layer.get_kv_cache_spec(SimpleNamespace(cache_config=cache, num_speculative_tokens=0))
    return spec.num_prefill_checkpoint_blocks

assert promised() == 1
cpu_mamba2_checkpoints.apply()
assert promised() == 0
""",
    "olmo": """
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
from vllm_hypic.patches import cpu_olmo_allocator, cpu_olmo_recurrence, olmo_conv_loader

def loaded():
    # The second of two ranks: of parts with 2, 2 and 4 channels it has the second halves.
    weight = torch.nn.Parameter(torch.zeros(4, 1, 3))
    loader = olmo._make_fused_conv1d_weight_loader([2, 2, 4], 2, 1)
    for part, channels in enumerate([2, 2, 4]):
        given = (10 * part + torch.arange(channels)).float()[:, None].expand(channels, 3).clone()
        given.shard_id = part
        loader(weight, given)
    return weight[:, 0, 0].tolist()

def recurrence():
    gate = torch.zeros(1, 2)
    return olmo.fused_olmo_hybrid_gdn_gating(gate[0], gate, gate, gate[0])

allocator = lambda: olmo.set_triton_allocator(torch.device("cpu"))
assert fails(allocator, AttributeError), told
cpu_olmo_allocator.apply()
allocator()
assert fails(loaded, TypeError), told
olmo_conv_loader.apply()
assert loaded() == [1, 11, 22, 23]
assert fails(recurrence, TypeError), told
cpu_olmo_recurrence.apply()
from vllm.model_executor.custom_op import op_registry_oot
ours = op_registry_oot["OlmoHybridGatedDeltaNetAttention"]
assert ours._forward_core is not olmo.OlmoHybridGatedDeltaNetAttention._forward_core
""",
    "kimi": """
import sys
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as kimi
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention
from vllm.model_executor.models.registry import ModelRegistry
from vllm.triton_utils import dispatcher
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm_hypic.patches import cpu_kernel_overrides, cpu_kimi_model, cpu_kimi_recurrence, cpu_mla_blocks

name = "KimiLinearForCausalLM"
assert ModelRegistry.models[name].module_name == "vllm.models.kimi_k3", told
cpu_kimi_model.apply()
model = ModelRegistry.models[name].load_model_cls()
assert model.__module__ == cpu_kimi_model.MODULE

class Library:
    kernel = None
    def __getattribute__(self, name):
        return len if name == "__dict__" else object.__getattribute__(self, name)

sys.modules["__main__"].library = Library()

assert fails(lambda: dispatcher._rebind_kernels([]), (AttributeError, TypeError)), told
cpu_kernel_overrides.apply()
dispatcher._rebind_kernels([])

assert CPUMLABackend.supports_block_size(16) and not CPUMLABackend.supports_block_size(128), told
cpu_mla_blocks.apply()
assert CPUMLABackend.supports_block_size(128) and not CPUMLABackend.supports_block_size(24)

cpu_kimi_recurrence.apply()
ours = op_registry_oot["KimiGatedDeltaNetAttention"]
assert ours._forward is not kimi.KimiGatedDeltaNetAttention._forward
ours = op_registry_oot["BailingMoeV3KimiDeltaAttention"]
assert ours.forward is not BailingMoeV3KimiDeltaAttention.forward
""",
    "bailing": """
import torch.nn.functional as F
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.linear import bailing_linear_attn as bailing
from vllm_hypic.patches import bailing_config, cpu_bailing_norms, cpu_bailing_recurrence

assert not {bailing_config.MODEL_TYPE, "bailing_moe_linear"} & set(CONFIG_MAPPING), told
bailing_config.apply()
linear = CONFIG_MAPPING["bailing_moe_linear"](rope_theta=6e5, partial_rotary_factor=0.5)
assert linear.use_rmsnorm and linear.rope_parameters["partial_rotary_factor"] == 0.5
scaling = {"type": "yarn", "factor": 4.0}
read = CONFIG_MAPPING[bailing_config.MODEL_TYPE](
    any_field=3, rope_theta=6e6, partial_rotary_factor=0.5, rope_scaling=scaling, max_position_embeddings=800)
assert read.any_field == 3 and read.rope_parameters["original_max_position_embeddings"] == 800
third = CONFIG_MAPPING[bailing_config.MODEL_TYPE].from_dict({"architectures": ["BailingMoeV3ForCausalLM"]})
assert type(third).__name__ == "BailingMoeV3TextConfig"
said = {"rope_type": "yarn", "rope_theta": 6e6, "partial_rotary_factor": 0.5}
assert said.items() <= read.rope_parameters.items()

torch.manual_seed(0)
x, z, weight = torch.randn(5, 3, 64), torch.randn(5, 192), torch.randn(64)

def normed():
    return bailing.layernorm_fn(x, weight, bias=None, eps=1e-5, is_rms_norm=True)

assert fails(normed, AttributeError, "triton"), told
cpu_bailing_norms.apply()
assert (normed() - F.rms_norm(x, (64,), weight, 1e-5)).abs().max() < 1e-5
gate = bailing.BailingGroupRMSNormGate(192, group_size=64)
gate.weight.data.normal_()
plain = F.rms_norm(x, (64,), eps=1e-5).flatten(1) * gate.weight
assert (gate(x.flatten(1), z) - plain * z.sigmoid()).abs().max() < 1e-5
assert (gate(x.flatten(1)) - plain).abs().max() < 1e-5

cpu_bailing_recurrence.apply()
ours = op_registry_oot["BailingMoELinearAttention"]
assert ours._decode_infer is not bailing.BailingMoELinearAttention._decode_infer
""",
    "mamba1": """
import torch.nn.functional as F
from vllm.model_executor.layers.mamba import mamba_mixer
from vllm_hypic.patches import cpu_mamba1

torch.manual_seed(0)
rows, channels, N = 9, 32, 16
x, dt, z = (torch.randn(rows, channels).t() for _ in range(3))  # as the layer has them
B, C = (torch.randn(N, rows) for _ in range(2))
A, D, bias = -torch.rand(channels, N), torch.randn(channels), torch.randn(channels)

S, truth = torch.zeros(channels, N), torch.zeros(channels, rows)
for t in range(rows):
    d = F.softplus(dt[:, t] + bias)
    S = (A * d[:, None]).exp() * S + torch.outer(d * x[:, t], B[:, t])
    truth[:, t] = (S @ C[:, t] + D * x[:, t]) * F.silu(z[:, t])

def prefill(states, begin, end, resumed):
    return mamba_mixer.selective_scan_fn(
        x[:, begin:end], states, dt[:, begin:end], A, B[:, begin:end], C[:, begin:end], D, z[:, begin:end],
        bias, delta_softplus=True, cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([resumed]), query_start_loc=torch.tensor([0, end - begin]))

states = torch.zeros(3, channels, N)
assert fails(lambda: prefill(states, 0, rows, False), AttributeError, "selective_scan_fwd"), told
cpu_mamba1.apply()
found = [prefill(states, 0, 3, False), prefill(states, 3, 8, True)]
last = torch.empty(1, channels)
mamba_mixer.selective_state_update(
    states, *(t[:, 8:].t() for t in (x, dt)), A, B[:, 8:].t(), C[:, 8:].t(), D, bias, z=z[:, 8:].t(),
    dt_softplus=True, state_batch_indices=torch.tensor([[1]], dtype=torch.int32), out=last)
assert (torch.cat([*found, last.t()], dim=1) - truth).abs().max() < 1e-5
assert (states[1] - S).abs().max() < 1e-5 and not states[[0, 2]].any()
""",
}
"""By what they show; all but the first run behind :data:`BEGINNING`."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_a_process_of_its_own(name: str) -> None:
    if name == "one-token-conv" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM has this kernel for CPUs with AVX512-BF16 only")
    code = SCRIPTS[name] if name == "applied-twice" else BEGINNING + SCRIPTS[name]
    done = forked.run([sys.executable, "-c", code], timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_another_signature_is_refused() -> None:
    def changed(self: object, something_else: int) -> None: ...

    with pytest.raises(PatchError, match="supports vLLM"):
        require_parameters(changed, "self", "usage_context")


THREADS = """
import torch
torch.set_num_threads(3)
import numpy as np
from vllm_hypic.patches import cpu_numba_threads
cpu_numba_threads.apply()
from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba, get_num_threads
known = np.array([20, 20], dtype=np.int32), np.zeros((2, 100), dtype=np.int32)
batch_propose_numba([0, 1], *known, 1, 3, 100, 3, np.zeros((2, 3), np.int32), np.zeros(2, np.int32))
assert (get_num_threads(), torch.get_num_threads()) == (3, 3), (get_num_threads(), torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_looking_drafts_up_leaves_the_number_of_threads() -> None:
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
