"""vLLM's own kernels of Kimi delta attention against our reference: what their states, gates and norms are.

A composed request's state goes on in these kernels, token by token: they must mean the same by it.
"""

import pytest
import torch
from torch import Tensor
from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent_kda_packed_decode
from vllm.platforms import current_platform
from vllm.third_party.flash_linear_attention.ops.kda import fused_recurrent_kda

from vllm_hypic.backends.ops.gated_delta import GatedDeltaInputs, GatedDeltaWeights, reference
from vllm_hypic.backends.ops.linear_layer.arguments import LayerCaches
from vllm_hypic.backends.ops.program import ordinary
from vllm_hypic.pool.tensors import LinearRecords

HEADS, K, TOKENS = 2, 32, 3
LIMIT = 2e-6
"""Largest error of results, which are about 1, in float32."""


class Step:
    """A token of each of three requests, whose states [V, K] are random; the convolution does nothing."""

    def __init__(self, bound: float | None) -> None:
        gen = torch.Generator().manual_seed(5)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen)

        self.bound = bound
        # A key so short that the epsilon of its norm counts.
        self.mixed = normal(TOKENS, 3 * HEADS * K)
        self.mixed[1, HEADS * K : 2 * HEADS * K] *= 1e-3
        self.a, self.b = normal(TOKENS, HEADS, K), normal(TOKENS, HEADS)
        self.A_log, self.dt_bias = torch.rand(HEADS, generator=gen), normal(HEADS * K) - 1
        self.state = normal(5, HEADS, K, K)
        self.slots = torch.tensor([4, 1, 3], dtype=torch.int32)

    def weights(self) -> GatedDeltaWeights:
        taps = torch.zeros(self.mixed.shape[1], 4)
        taps[:, -1] = 1
        bias = self.dt_bias.view(HEADS, K)
        return GatedDeltaWeights.prepare(
            taps, None, self.A_log, bias, HEADS, 1e-6, gate_bound=self.bound or 0.0
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs [n, H, V] and states [n, H, V, K] in float64."""
        state = self.state.double().transpose(2, 3).clone()
        out = torch.zeros(TOKENS, HEADS, K, dtype=torch.float64)
        caches = LayerCaches(self.slots, torch.zeros(5, 3, self.mixed.shape[1]), state)
        records = LinearRecords(
            state=torch.empty(0, HEADS, K, K),
            conv_tail=torch.empty(0, 3, 3 * HEADS * K),
            transitions=torch.empty(0, K, K, dtype=torch.float16),
            block_of=torch.empty(0, HEADS, dtype=torch.int32),
        )
        given = GatedDeltaInputs(self.mixed, self.a, self.b), self.weights(), caches, out, records
        reference.gdn_compose(*given, *ordinary(range(TOKENS + 1), [True] * TOKENS))
        return out, state.transpose(2, 3)[self.slots.long()]

    def check(self, out: Tensor, state: Tensor) -> None:
        wanted, after = self.expected()
        assert (out.double() - wanted).abs().max() < LIMIT
        assert (state[self.slots.long()].double() - after).abs().max() < LIMIT


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_arch_support_pdl", lambda *_: False)
    step = Step(bound)
    state = step.state.clone()
    out, _ = fused_recurrent_kda_packed_decode(
        *(torch.nn.functional.silu(step.mixed), step.a[None], step.b[None], step.A_log, step.dt_bias),
        *(bound, state, step.slots),
    )
    step.check(out[0], state)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_bailing(bound: float | None) -> None:
    step = Step(bound)
    state = step.state.clone()
    q, k, v = torch.nn.functional.silu(step.mixed).view(1, TOKENS, 3, HEADS, K).unbind(2)
    g = step.weights().log_decay(step.a)  # vLLM's kernel for it measures several variants on a GPU
    starts = torch.arange(TOKENS + 1, dtype=torch.int32)
    out, _ = fused_recurrent_kda(
        *(q, k, v, g[None], step.b.float().sigmoid()[None]),
        initial_state=state,
        cu_seqlens=starts,
        ssm_state_indices=step.slots,
    )
    step.check(out[0], state)
