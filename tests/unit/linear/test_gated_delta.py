"""The closed-form gated delta operators against the float64 token loop, and against vLLM's own operator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_hypic.backends.ops.gated_delta import chunk, reference, seam_outputs, segment_summary

from .layers import relative, step_biases

SHAPES = [(2, 4, 64, 64), (2, 2, 128, 128), (1, 3, 48, 80)]  # Hk, Hv, K, V
SIZES = [1, 2, 3, 15, 16, 17, 63, 64, 65, 200]
FP32 = 1e-6
GATES = pytest.mark.parametrize("channel_gates", [False, True], ids=["of-heads", "of-channels"])
T_FP16 = 1.5e-4


class GatedDelta(NamedTuple):
    """Arguments of the gated delta operators but for the boundaries."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def tail(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.g, self.beta

    def cut(self, lo: int, hi: int) -> GatedDelta:
        return GatedDelta(*(x[lo:hi] for x in self))


def gated_delta_inputs(
    n: int,
    Hk: int,
    Hv: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    channel_gates: bool = False,
) -> GatedDelta:
    """Gates as Mamba and GDN initialise them: A in [1, 16], step sizes log-uniform in [1e-3, 1e-1]."""
    gates = (Hv, K) if channel_gates else (Hv,)
    gen = torch.Generator().manual_seed(seed)
    q, k = torch.randn(n, Hk, K, generator=gen), torch.randn(n, Hk, K, generator=gen)
    v, beta = torch.randn(n, Hv, V, generator=gen), torch.rand(n, Hv, generator=gen)
    A = 1 + 15 * torch.rand(gates, generator=gen)
    bias = step_biases(gen, *gates)
    g = -A * F.softplus(bias + 0.5 * torch.randn(n, *gates, generator=gen))
    return GatedDelta(q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype))


def starts(B: int, x: GatedDelta, seed: int = 5) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(B, x.v.shape[1], x.k.shape[2], x.v.shape[2], generator=gen)


def check(
    x: GatedDelta, cu: Sequence[int], S0: Tensor, *, out: float = FP32, states: float = FP32
) -> tuple[Tensor, ...]:
    """Both operators against the token loop: T, S, outputs and end states.

    T of a head that forgets is tiny, so it is judged by the states it makes, as it is used.
    """
    T, S = segment_summary(*x.tail, torch.tensor(cu))
    o, end = seam_outputs(*x, cu, S0)
    _, S_exact = reference.segment_summary(*x.tail, cu)
    o_exact, end_exact = reference.seam_outputs(*x, cu, S0)
    for i, n in enumerate(b - a for a, b in pairwise(cu)):
        if n == 0:
            assert torch.equal(T[i], torch.eye(x.k.shape[2]).expand_as(T[i]))
            assert not S[i].any() and torch.equal(end[i], S0[i])
            continue
        assert relative(T[i] @ S0[i].to(T) + S[i], end_exact[i]) < states
        assert relative(S[i], S_exact[i]) < states
        assert relative(end[i], end_exact[i]) < states
    assert relative(o, o_exact) < out
    return T, S, o, end


@GATES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", SIZES)
def test_one_sequence(n: int, shape: tuple[int, int, int, int], channel_gates: bool) -> None:
    x = gated_delta_inputs(n, *shape, channel_gates=channel_gates)
    found = check(x, [0, n], starts(1, x))
    assert relative(found[0], reference.segment_summary(*x.tail, [0, n])[0]) < FP32
    assert {t.dtype for t in found} == {torch.float32}


@GATES
@pytest.mark.parametrize("shape", SHAPES)
def test_many_sequences_amid_poison(shape: tuple[int, int, int, int], channel_gates: bool) -> None:
    """All sizes packed in one call, empty ones among them, NaN before, behind and in what is padding."""
    lengths = [3, 200, 0, 1, 16, 65, 64, 2, 63, 17, 15, 0]
    pad = 7
    cu = [*accumulate(lengths, initial=pad)]
    x = gated_delta_inputs(cu[-1] + pad, *shape, channel_gates=channel_gates)
    for tensor in x:
        tensor[:pad] = torch.nan
        tensor[cu[-1] :] = torch.nan
    *_, o, _ = check(x, cu, starts(len(lengths), x))
    assert not o[:pad].any() and not o[cu[-1] :].any()


def test_neighbours_do_not_leak() -> None:
    """A poisoned sequence beside a sound one, in one call: only its own results are poisoned."""
    x = gated_delta_inputs(100, 2, 4, 32, 32)
    cu = [0, 40, 57, 100]
    S0 = starts(3, x)
    clean = (*segment_summary(*x.tail, cu), seam_outputs(*x, cu, S0)[1])
    for tensor in x:
        tensor[40:57] = torch.nan
    poisoned = (*segment_summary(*x.tail, cu), seam_outputs(*x, cu, S0)[1])
    for before, now in zip(clean, poisoned, strict=True):
        assert torch.equal(now[0], before[0])
        assert torch.equal(now[2], before[2])
        assert now[1].isnan().any()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [[1, 63, 64, 65], [200, 200], [16, 17, 300], [65, 3, 2, 130]])
def test_composed_state(lengths: list[int], dim: int) -> None:
    """Summaries of pieces, each from zero, compose to the single float64 pass."""
    x = gated_delta_inputs(sum(lengths), 2, 4, dim, dim, seed=len(lengths))
    cu = [*accumulate(lengths, initial=0)]
    S0 = starts(1, x)
    _, exact = reference.seam_outputs(*x, [0, cu[-1]], S0)
    T, S = segment_summary(*x.tail, cu)

    def composed(T: Tensor) -> Tensor:
        state = S0[0]
        for i in range(len(lengths)):
            state = T[i] @ state + S[i]
        return state

    error = relative(composed(T), exact[0])
    assert error < FP32
    assert relative(composed(T.half().float()), exact[0]) < T_FP16
    naive = relative(S0[0] + S.sum(0), exact[0])
    assert naive > 1e5 * error, "leaving T out must not go unnoticed"


@pytest.mark.parametrize("strong", [-50.0, -5.0, 0.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_gates(strong: float, beta: float) -> None:
    """Gates of -50 and of exactly 0, all along and mixed, with no, full and negative-eigenvalue writes."""
    n, cu = 130, [0, 130]
    x = gated_delta_inputs(n, 2, 4, 64, 64)
    g = torch.full_like(x.g, strong)
    g[::7, 1] = 0.0
    g[:, 2] = 0.0
    g[3, 2] = strong  # one cut, then perfect memory: only differences of G can tell
    g[:, 3] = torch.where(torch.arange(n) % 2 == 0, 0.0, strong)
    x = x._replace(g=g, beta=torch.full_like(x.beta, beta))
    S0 = starts(1, x)
    T, S = segment_summary(*x.tail, cu)
    o, end = seam_outputs(*x, cu, S0)
    o_exact, end_exact = reference.seam_outputs(*x, cu, S0)
    assert all(y.isfinite().all() for y in (T, S, o, end))
    for head in range(4):
        scale = max(float(end_exact[:, head].norm()), 1e-12)
        assert float((end[:, head] - end_exact[:, head]).norm()) < FP32 * scale
        assert float(((T @ S0 + S)[:, head] - end_exact[:, head]).norm()) < FP32 * scale
    assert relative(o, o_exact) < FP32


def test_strongly_correlated_keys() -> None:
    """All keys equal makes I + L as full as it can be; its inverse must stay accurate."""
    x = gated_delta_inputs(200, 1, 2, 64, 64)
    x = x._replace(k=x.k[:1] + 1e-3 * x.k, beta=torch.full_like(x.beta, 0.95), g=x.g * 0.01)
    check(x, [0, 200], starts(1, x), out=2 * FP32)


@pytest.mark.parametrize("cuts", [[64, 128], [1, 17, 65], [100], [199]])
def test_a_segment_in_pieces(cuts: list[int]) -> None:
    """What chunked prefill does: every piece carries on from the summary of the pieces before it."""
    x = gated_delta_inputs(200, 2, 4, 64, 64)
    T_exact, S_exact = reference.segment_summary(*x.tail, [0, 200])
    T, S = None, torch.zeros_like(starts(1, x))
    for lo, hi in pairwise([0, *cuts, 200]):
        own_T, own_S = segment_summary(*x.cut(lo, hi).tail, [0, hi - lo])
        S = own_T @ S + own_S
        T, _ = segment_summary(*x.cut(lo, hi).tail, [0, hi - lo], T)
    assert relative(T, T_exact) < FP32
    assert relative(S, S_exact) < FP32


def test_a_batch_of_pieces_with_and_without_predecessors() -> None:
    x = gated_delta_inputs(150, 2, 4, 32, 48)
    cu = [0, 20, 120, 150]
    T0 = torch.randn(3, 4, 32, 32) / 8
    T, S = segment_summary(*x.tail, cu, T0)
    T_exact, S_exact = reference.segment_summary(*x.tail, cu, T0)
    assert relative(T, T_exact) < FP32
    assert relative(S, S_exact) < FP32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_dtypes(dtype: torch.dtype) -> None:
    """Rounded inputs are exact inputs: only the arithmetic is judged. float64 checks the algebra itself."""
    x = gated_delta_inputs(90, 2, 4, 64, 64, dtype)
    rounding = {torch.float64: 1e-13, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    states = 1e-13 if dtype == torch.float64 else FP32
    assert check(x, [0, 64, 90], starts(2, x), out=rounding, states=states)[2].dtype == dtype


def test_arguments_are_read_only_and_may_be_strided() -> None:
    n, Hk, Hv, d = 70, 2, 4, 32
    q, k, v = torch.randn(n, (2 * Hk + Hv) * d).split([Hk * d, Hk * d, Hv * d], dim=-1)
    x = gated_delta_inputs(n, Hk, Hv, d, d)
    x = x._replace(q=q.unflatten(-1, (-1, d)), k=k.unflatten(-1, (-1, d)), v=v.unflatten(-1, (-1, d)))
    dense = GatedDelta(*(y.contiguous() for y in x))
    S0, T0 = starts(2, x), torch.eye(d).expand(2, Hv, -1, -1)
    given = (*x, S0, T0)
    copies, cu = [y.clone() for y in given], [0, 64, 70]
    T, S = segment_summary(*x.tail, cu, T0)
    o, end = seam_outputs(*x, cu, S0)
    assert all(map(torch.equal, copies, given))
    T.zero_(), S.zero_(), end.zero_()
    assert all(map(torch.equal, copies, given)), "results must own their memory"
    assert torch.equal(o, seam_outputs(*dense, cu, S0)[0])


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 64])
@pytest.mark.parametrize("block_bytes", [1, 1 << 30])
def test_any_chunk_and_block_size(chunk_size: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "_CHUNK_CPU", chunk_size)
    monkeypatch.setattr(chunk, "_BLOCK_BYTES_CPU", block_bytes)
    x = gated_delta_inputs(150, 2, 4, 32, 32)
    check(x, [0, 20, 120, 150], starts(3, x))


def test_nothing_at_all() -> None:
    x = gated_delta_inputs(0, 2, 4, 8, 8)
    T, S = segment_summary(*x.tail, [0])
    assert T.shape == (0, 4, 8, 8)
    o, end = seam_outputs(*x, [0, 0], torch.ones(1, 4, 8, 8))
    assert o.shape == x.v.shape
    assert torch.equal(end, torch.ones(1, 4, 8, 8))
    assert S.shape == (0, 4, 8, 8)


def test_wrong_arguments_are_named() -> None:
    x = gated_delta_inputs(10, 2, 4, 8, 8)
    other_heads = (x.k, x.v[:, :3], x.g[:, :3], x.beta[:, :3])
    for given, says in (
        *(((*x.tail, bad), "cu_seqlens") for bad in ([0, 11], [5, 2], [-1, 10], [])),
        ((*other_heads, [0, 10]), "multiple"),
        ((x.k, x.v, x.g[:5], x.beta, [0, 10]), "shapes disagree"),
    ):
        with pytest.raises(ValueError, match=says):
            segment_summary(*given)
    with pytest.raises(ValueError, match="initial_states"):
        seam_outputs(*x, [0, 10], torch.zeros(2, 4, 8, 8))
    with pytest.raises(ValueError, match="one shape"):
        seam_outputs(x.q[:, :1], *x.tail, [0, 10], torch.zeros(1, 4, 8, 8))


# --------------------------------------------------------------------------------------- the reference itself


@GATES
@pytest.mark.parametrize("lengths", [[1, 63, 64, 65], [2, 7], [65, 1, 64]])
def test_the_references_summaries_compose_to_one_scan(lengths: list[int], channel_gates: bool) -> None:
    """In float64; the other way round, or without T, they do not."""
    total, seed = sum(lengths), len(lengths)
    x = gated_delta_inputs(total, 2, 4, 8, 6, torch.float64, seed=seed, channel_gates=channel_gates)
    x = x._replace(g=x.g * 0.05)
    cu = [*accumulate(lengths, initial=0)]
    S0 = starts(1, x).double()
    _, exact = reference.seam_outputs(*x, [0, cu[-1]], S0)
    T, S = reference.segment_summary(*x.tail, cu)
    state, together_T, together_S = S0[0], torch.eye(8, dtype=torch.float64), torch.zeros_like(S0[0])
    for i in range(len(lengths)):
        state = T[i] @ state + S[i]
        together_T, together_S = T[i] @ together_T, T[i] @ together_S + S[i]
    assert relative(state, exact[0]) < 1e-12
    assert relative(together_T @ S0[0] + together_S, exact[0]) < 1e-12
    assert relative(S0[0] + S.sum(0), exact[0]) > 1e-6, "leaving T out must not go unnoticed"


@GATES
def test_one_token_acts_as_its_transition_says(channel_gates: bool) -> None:
    """The reference finds T by the recurrence itself; here it is written down, and its factors do not commute
    where channels have gates."""
    x = gated_delta_inputs(3, 2, 4, 8, 6, torch.float64, channel_gates=channel_gates)
    T, _ = reference.segment_summary(*x.tail, [0, 1, 2, 3])
    k = x.k * torch.rsqrt((x.k * x.k).sum(-1, keepdim=True) + reference.l2_eps(x.k.device))
    k, beta = k.repeat_interleave(2, 1), x.beta[..., None, None].double()
    decay = (x.g.double() if channel_gates else x.g.double()[..., None].expand(3, 4, 8)).exp().diag_embed()
    erase = torch.eye(8, dtype=torch.float64) - beta * k[..., :, None] * k[..., None, :]
    assert relative(T, erase @ decay) < 1e-14
    assert (relative(T, decay @ erase) > 1e-3) == channel_gates


# ------------------------------------------------------------------------------------------ vLLM's operator


def vllm_operator(x: GatedDelta, state: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's CPU operator over one sequence from `state` [1, Hv, K, V]; returns outputs and the end state."""
    ops = pytest.importorskip("vllm._custom_ops", reason="no vLLM")
    pytest.importorskip("vllm.platforms", reason="no vLLM").current_platform.import_kernels()
    state = state.clone()
    q, k, v, g, beta = (y[None].contiguous() for y in x)
    out, _ = ops.chunk_gated_delta_rule_cpu(
        query=q,
        key=k,
        value=v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, x.k.shape[0]], dtype=torch.int32),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.zeros(1, dtype=torch.int32),
    )
    return out[0], state


@pytest.mark.parametrize("shape", [(2, 4, 64, 64), (2, 2, 128, 128)])
def test_conventions_are_those_of_vllm(shape: tuple[int, int, int, int]) -> None:
    """Same arguments, same results up to bf16: scales, epsilon, head grouping, state layout, gate order."""
    x = gated_delta_inputs(100, *shape, torch.bfloat16)
    # Short keys make the epsilon of the norm visible.
    x = x._replace(k=x.k * 3e-3, q=x.q * 3e-3)
    S0 = starts(1, x)
    o_vllm, end_vllm = vllm_operator(x, S0)
    o, end = seam_outputs(*x, [0, 100], S0)
    assert relative(end_vllm, end) < 1e-2
    assert relative(o_vllm, o) < 1e-2


@pytest.mark.parametrize("shape", [(2, 4, 64, 64), (2, 2, 128, 128)])
@pytest.mark.parametrize(("lead", "interior", "seam"), [(64, 48, 16), (100, 200, 16), (300, 513, 11)])
def test_composing_is_as_good_as_chunked_prefill(
    lead: int, interior: int, seam: int, shape: tuple[int, int, int, int]
) -> None:
    """A system prompt, a cached interior, a seam err no more than vLLM's own resumption does."""
    n = lead + interior + seam
    x = gated_delta_inputs(n, *shape, torch.bfloat16, seed=n)
    zero = torch.zeros_like(starts(1, x))
    o_exact, end_exact = reference.seam_outputs(*x, [0, n], zero)

    _, at_lead = vllm_operator(x.cut(0, lead), zero)
    o_stock, end_stock = vllm_operator(x.cut(lead, n), at_lead)

    # The system prompt's state comes from the engine; the interior's record was made elsewhere, from zero.
    T, S = segment_summary(*x.cut(lead, lead + interior).tail, [0, interior])
    before_seam = T.half().float() @ at_lead + S
    o, end = seam_outputs(*x.cut(n - seam, n), [0, seam], before_seam)

    stock_error = relative(end_stock, end_exact)
    assert relative(end, end_exact) < 1.2 * stock_error
    assert relative(o, o_exact[-seam:]) < 1.2 * relative(o_stock[-seam:], o_exact[-seam:])
    naive = seam_outputs(*x.cut(n - seam, n), [0, seam], at_lead + S)[1]
    assert relative(naive, end_exact) > 10 * stock_error, "leaving T out must not go unnoticed"
