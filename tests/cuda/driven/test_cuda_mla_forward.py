"""Latent attention on CUDA, on the CPU: vLLM's layer and its TRITON_MLA with ours before it.

vLLM's layer divides the batch, absorbs and projects up; its decode is its own Triton kernel, in the
interpreter, as ours are.  Its prefill kernel is a stand-in, computed in float64, that has the context, too.
A batch of plain rows, composed rows and captured rows must give full attention.
"""

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from full_attention import attend, stream, table_of
from mixed_batch import pass_of, starts_of
from vllm import triton_utils
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import triton_decode_attention

from vllm_hypic.backends.attach import layer_refusal
from vllm_hypic.backends.attention import cuda_rows
from vllm_hypic.backends.attention.base import AttentionLink
from vllm_hypic.backends.attention.cuda_mla import backend_of
from vllm_hypic.backends.ops.span_attention.eager import rotate
from vllm_hypic.pool.geometry import LatentGeometry, PoolGeometry
from vllm_hypic.pool.plans import CapturePlan
from vllm_hypic.pool.runtime import HypicRuntime
from vllm_hypic.pool.tensors import DevicePool

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, RANK, VALUE = 4, 16, 16, 32, 24
SIZE = RANK + ROPE
SCALE = (NOPE + ROPE) ** -0.5
BLOCK = 16
SLOTS = 64
"""Token slots of the pool."""
LIMITS = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Largest error allowed, in units of V, which is about 1: queries, latents and results are rounded."""
TF32 = 100.0
"""How much larger that of a float32 row is that vLLM decodes, by products in TF32: request 0's."""
LENGTHS = ((20, 1), (17, 1), (2, 7), (3, 6), (0, 4), (18, 5))
"""Of each request tokens behind it and in this pass: a plain decode, a composed one, a composed prefill, a
segment request, a composed request that sees nothing yet, a plain prefill."""


@dataclass
class World:
    """One layer and a batch of these requests, with poisoned padding.

    ``threshold``: requests of at most so many rows are decoded, as FLASH_ATTN_MLA and FLASHMLA do.
    ``record``: rows ``[k_pe | c]`` that the composed decode reads for its record, k_pe unrotated.
    """

    dtype: torch.dtype
    neox: bool = False
    rotated: bool = True
    threshold: int = 1
    record: torch.Tensor | None = None

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(7)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=gen).to(self.dtype)

        geometry = PoolGeometry(
            (LatentGeometry("layer", 1, SIZE, self.dtype),), (), page_tokens=8, pages=SLOTS // 8, slots=8
        )
        self.table = table_of(128, ROPE) if self.rotated else None
        self.pool = DevicePool(geometry, CPU)
        self.latents = self.pool.kv["layer"].key
        self.latents.fill_(math.nan)
        self.runtime = HypicRuntime(self.pool, 0.0)
        places = torch.randperm(SLOTS, generator=gen)
        self.columns = places[:19], places[19:30]
        for slots in self.columns:
            self.latents[slots] = normal(len(slots), 1, SIZE)
        if self.record is not None:
            self.latents[self.columns[1][: len(self.record)], 0] = self.record
            self.columns = self.columns[0], self.columns[1][: len(self.record)]
        self.capture_slots = places[30:36]

        self.starts = starts_of(LENGTHS)
        plans = {
            1: stream(self.columns, [1], [2], 3),
            2: stream(self.columns, [0, 1], [3, 5], 9),
            4: stream(self.columns, [0], [4], 6),
        }
        capture = CapturePlan(2, 8, 0, self.capture_slots.numpy(), None, leading=False)
        self.step = pass_of(LENGTHS, plans, {3: capture})
        self.runtime.step = self.step

        tokens = self.starts[-1]
        self.query = torch.full((tokens + 3, HEADS, NOPE + ROPE), math.nan, dtype=self.dtype)
        self.latent = torch.full((tokens + 3, RANK), math.nan, dtype=self.dtype)
        self.key = torch.full((tokens + 3, 1, ROPE), math.nan, dtype=self.dtype)
        self.query[:tokens], self.latent[:tokens] = normal(tokens, HEADS, NOPE + ROPE), normal(tokens, RANK)
        self.key[:tokens] = normal(tokens, 1, ROPE)
        # vLLM's cache; k_pe of the private stream is rotated by whoever put it there.
        used = [s0 + n for s0, n in LENGTHS]
        blocks = [-(-n // BLOCK) for n in used]
        order = torch.randperm(sum(blocks), generator=gen) + 1
        self.block_table = torch.zeros(len(used), max(blocks), dtype=torch.int32)
        self.cache = torch.full((sum(blocks) + 1, BLOCK, SIZE), math.nan, dtype=self.dtype)
        self.slot_mapping = torch.zeros(tokens, dtype=torch.int64)
        for i, (s0, n) in enumerate(LENGTHS):
            mine = order[sum(blocks[:i]) : sum(blocks[: i + 1])]
            self.block_table[i, : len(mine)] = mine
            token = torch.arange(s0 + n)
            self.cache[mine[token // BLOCK], token % BLOCK] = normal(s0 + n, SIZE)
            here = slice(self.starts[i], self.starts[i + 1])
            self.slot_mapping[here] = mine[token[s0:] // BLOCK] * BLOCK + token[s0:] % BLOCK
        self.write()
        self._make_layer(normal(RANK, HEADS, NOPE + VALUE) / RANK**0.5)

    def write(self) -> None:
        """The pass's rows into vLLM's cache, as stock code does before attention."""
        tokens = self.starts[-1]
        rows = torch.cat([self.latent[:tokens], self.key[:tokens, 0]], -1)
        self.cache[self.slot_mapping // BLOCK, self.slot_mapping % BLOCK] = rows

    def _make_layer(self, up: torch.Tensor) -> None:
        """``up [rank, heads, nope + value]``: the up-projections."""
        self.up = up
        impl: Any = backend_of(AttentionBackendEnum.TRITON_MLA).get_impl_cls()
        self.impl = impl.__new__(impl)
        sizes = dict(qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, kv_lora_rank=RANK)
        own = {"num_heads": HEADS, "head_size": SIZE, "scale": SCALE, "kv_cache_dtype": "auto"}
        switches = dict(dcp_world_size=1, indexer=None, _use_flashinfer_concat_mla_k=False, _sm_count=2)
        vars(self.impl).update(**sizes, **own, **switches, kv_b_proj=lambda c: (c @ up.flatten(1), None))
        self.layer: Any = mla.MLAAttention.__new__(mla.MLAAttention)
        torch.nn.Module.__init__(self.layer)
        flags = ("aiter_triton_fp4_bmm", "aiter_triton_fp8_bmm", "amx_bmm")
        unset = ("q_pad_num_heads", "prefill_backend", "hisparse_cache")
        vars(self.layer).update(
            **sizes,
            **own,
            **{f"is_{flag}_enabled": False for flag in flags},
            **dict.fromkeys(unset),
            impl=self.impl,
            use_pcp=False,
            kv_cache=self.cache,
            _k_scale=torch.ones(1),
            W_UK_T=up[..., :NOPE].permute(1, 2, 0),
            W_UV=up[..., NOPE:].transpose(0, 1),
        )
        rope: Any = SimpleNamespace(cos_sin_cache=self.table, is_neox_style=self.neox)
        link = AttentionLink(self.runtime, self.pool.kv["layer"], rope if self.rotated else None)
        self.impl.connect(self.layer, link)

    @property
    def metadata(self) -> mla.MLACommonMetadata:
        lengths = [n for _, n in LENGTHS]
        decodes = next(i for i, n in enumerate([*lengths, self.threshold + 1]) if n > self.threshold)
        used = torch.tensor([s0 + n for s0, n in LENGTHS], dtype=torch.int32)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        prefills = len(LENGTHS) - decodes
        backend: Any = SimpleNamespace(run_prefill_new_tokens=self.prefill)
        of_prefills = self.block_table[decodes:], starts[decodes:] - starts[decodes], max(lengths)
        prefill = mla.MLACommonPrefillMetadata(*of_prefills, prefill_backend=backend)
        return mla.MLACommonMetadata(
            num_reqs=len(LENGTHS),
            max_query_len=max(lengths),
            max_seq_len=int(used.max()),
            num_actual_tokens=self.starts[-1],
            query_start_loc=starts,
            slot_mapping=self.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=self.starts[decodes],
            num_prefills=prefills,
            prefill=prefill if prefills else None,
            decode=mla.MLACommonDecodeMetadata(self.block_table[:decodes], used[:decodes], None),
        )

    def own(self, request: int) -> torch.Tensor:
        """What vLLM's cache has of a request, ``[tokens, rank + rope]`` float64."""
        tokens = torch.arange(sum(LENGTHS[request]))
        return self.cache[self.block_table[request].long()[tokens // BLOCK], tokens % BLOCK].double()

    def attend(self, query: torch.Tensor, latent: torch.Tensor, key: torch.Tensor, seen: Any) -> torch.Tensor:
        """Attention in the form that is not absorbed: ``query [rows, heads, nope + rope]`` over ``latent
        [columns, rank]`` and ``key [columns, rope]``, rotated, of which row r sees ``seen[r]``: ``[rows,
        heads * value]`` float64."""
        up = torch.einsum("cr,rhn->chn", latent.double(), self.up.double())
        full = torch.cat([up[..., :NOPE], key.double()[:, None].expand(-1, HEADS, -1)], -1)
        # Of one width, as the helper wants it.
        value = torch.nn.functional.pad(up[..., NOPE:], (0, NOPE + ROPE - VALUE))
        return attend(query, full, value, torch.as_tensor(seen), SCALE)[0][..., :VALUE].flatten(1)

    def stock(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        own, (s0, n) = self.own(request), LENGTHS[request]
        return self.attend(rows, own[:, :RANK], own[:, RANK:], range(s0 + 1, s0 + n + 1))

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        """Stands in for vLLM's prefill kernel, and for what it adds of the context."""
        assert not more["return_softmax_lse"] and more["out"] is None
        first = len(LENGTHS) - self.metadata.num_prefills
        base = self.starts[first]
        new = torch.einsum("cr,rhn->chn", self.latent[base : self.starts[-1]].double(), self.up.double())
        torch.testing.assert_close(k[..., :NOPE].double(), new[..., :NOPE], atol=0.1, rtol=0.1)
        torch.testing.assert_close(v.double(), new[..., NOPE:], atol=0.1, rtol=0.1)
        parts = [
            self.stock(i, q[self.starts[i] - base : self.starts[i + 1] - base])
            for i in range(first, len(LENGTHS))
        ]
        return torch.cat(parts).unflatten(1, (HEADS, VALUE)).to(q.dtype)

    def forward(self) -> torch.Tensor:
        """The rows that count."""
        tokens = self.starts[-1]
        output = torch.full((tokens + 3, HEADS * VALUE), math.nan, dtype=self.dtype)
        self.layer.forward_impl(self.query, self.latent, self.key, self.cache, self.metadata, output=output)
        assert output[tokens:].isnan().all(), "padding was written"
        return output[:tokens]

    def expected(self) -> torch.Tensor:
        """Full attention of every row, in float64."""
        parts = []
        plans = {c.row.index: c.stream.plan for c in self.step.composed}
        for i, (s0, n) in enumerate(LENGTHS):
            rows = self.query[self.starts[i] : self.starts[i + 1]]
            if i not in plans:
                parts.append(self.stock(i, rows))
                continue
            own = self.own(i)
            public = self.latents[torch.from_numpy(plans[i].slot_mapping)].double()
            rotation = None if self.table is None else self.table[torch.from_numpy(plans[i].kv_positions)]
            key = rotate(public[..., :ROPE], rotation, self.neox)[:, 0].double()
            for r, seen in enumerate(plans[i].visible_kv_lens(s0, s0 + n).tolist()):
                latent = torch.cat([public[:seen, 0, ROPE:], own[: s0 + r + 1, :RANK]])
                keys = torch.cat([key[:seen], own[: s0 + r + 1, RANK:]])
                parts.append(self.attend(rows[r : r + 1], latent, keys, [len(keys)]))
        return torch.cat(parts)

    def error(self) -> float:
        """Largest in units of what is allowed."""
        error = (self.forward().double() - self.expected()).abs()
        if self.dtype == torch.float32:
            error[0] /= TF32
        return float(error.max()) / LIMITS[self.dtype]


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_vllm() -> Iterator[None]:
    """vLLM has no Triton where there is no GPU: its decode kernels are read again, with Triton."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_utils, "triton", triton)
        patch.setattr(triton_utils, "tl", triton.language)
        kernels = importlib.reload(triton_decode_attention)
        patch.setattr(triton_mla, "triton", triton)
        patch.setattr(triton_mla, "decode_attention_fwd", kernels.decode_attention_fwd)
        yield
    importlib.reload(triton_decode_attention)


def decode_any(self: Any, q: Any, cache: Any, metadata: mla.MLACommonMetadata, layer: Any) -> Any:
    """Stands in for a stock decode of requests of any number of rows, as FLASH_ATTN_MLA's; in float64."""
    nope, pe = (part.double() for part in q)
    decode = metadata.decode
    starts, out = metadata.query_start_loc.tolist(), torch.empty(nope.shape)
    for i, tokens in enumerate(decode.seq_lens.tolist()):
        at = torch.arange(tokens)
        own = cache[decode.block_table[i].long()[at // BLOCK], at % BLOCK].double()
        rows = slice(starts[i], starts[i + 1])
        seen = torch.arange(tokens - (starts[i + 1] - starts[i]), tokens) + 1
        query = torch.cat([nope[rows], pe[rows]], -1)
        out[rows] = attend(query, own[:, None], own[:, None], seen, self.scale)[0][..., :RANK]
    return out.to(q[0].dtype), None


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("neox", "rotated"), [(False, True), (True, True), (False, False)])
def test_a_mixed_batch_gets_full_attention(dtype: torch.dtype, neox: bool, rotated: bool) -> None:
    world = World(dtype, neox, rotated)
    assert (error := world.error()) < 1, error
    assert world.runtime.calls == {"capture_kv": 1, "span_attention": 2}


@pytest.mark.parametrize("threshold", [6, 100], ids=["some prefills", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_prefills_may_be_decoded(
    dtype: torch.dtype, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two of vLLM's backends do: composed and captured rows are then in the decode call, or in both."""
    monkeypatch.setattr(TritonMLAImpl, "forward_mqa", decode_any)
    if threshold < 7:
        # vLLM has such requests first.
        order = LENGTHS[0], LENGTHS[1], (2, 6), LENGTHS[3], (0, 7), LENGTHS[5]
        monkeypatch.setattr(sys.modules[__name__], "LENGTHS", order)
    world = World(dtype, threshold=threshold)
    assert (world.metadata.num_prefills == 0) == (threshold == 100)
    assert (error := world.error()) < 1, error
    assert world.runtime.calls["capture_kv"] == 1


def test_pieces_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every row, across requests."""
    monkeypatch.setattr(cuda_rows, "PARTIAL_BYTES", -1)
    monkeypatch.setattr(cuda_rows, "SHORTEST_OF_LATENTS", 1)
    world = World(torch.float32)
    assert (error := world.error()) < 1, error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_plain_rows_keep_the_bits_of_the_stock_implementation(dtype: torch.dtype) -> None:
    world = World(dtype)
    ours = world.forward()
    world.impl.link = None
    stock = world.forward()
    plain = [0, *range(world.starts[3], world.starts[-1])]
    assert torch.equal(ours[plain], stock[plain])
    composed = [world.starts[1], *range(world.starts[2] + 1, world.starts[3])]
    assert not torch.isclose(ours[composed], stock[composed]).all(dim=1).any(), "nothing was composed"


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_what_is_captured_is_composed_elsewhere(dtype: torch.dtype) -> None:
    """Interior rows get into the pool unrotated; another pass reads them at other positions."""
    world = World(dtype)
    raw = torch.randn(5, 1, ROPE, dtype=torch.float64)
    rows = slice(world.starts[3], world.starts[3] + 5)
    # Tokens 3 to 8 of the segment are of its interior and in this pass.
    world.key[rows] = rotate(raw, world.table[torch.arange(3, 8)].double(), False).to(dtype)
    world.write()
    world.forward()
    captured = world.latents[world.capture_slots[1:6], 0]
    assert torch.equal(captured[:, ROPE:], world.latent[rows])
    torch.testing.assert_close(captured[:, :ROPE].double(), raw[:, 0], atol=LIMITS[dtype], rtol=LIMITS[dtype])
    used = torch.cat([*world.columns, world.capture_slots[1:6]])
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, used, False)
    assert world.latents[others].isnan().all(), "slots of nobody were written"

    again = World(dtype, record=captured)
    columns = again.columns[1]
    found = again.forward().double()
    again.latents[columns, 0, :ROPE] = raw[:, 0].to(dtype)
    error = (found - again.expected()).abs()[1:].max()
    assert error < LIMITS[dtype], error


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rotation", "positions", "blocks", "tokens", "visible_kv_lens"])
def test_a_fault_would_show(fault: str) -> None:
    world = World(torch.float32)
    expected = world.expected()
    match fault:
        case "rotation":
            world.impl.link = replace(world.impl.link, rope=None)
        case "positions":
            for composed in world.step.composed:
                composed.stream.kv_positions += 1
        case "blocks":
            world.block_table = world.block_table.roll(1, 0).contiguous()
        case "tokens":
            for composed in world.step.composed:
                row = composed.row
                object.__setattr__(composed, "row", replace(row, s1=row.s1 - 1))
        case "visible_kv_lens":
            for composed in world.step.composed:
                composed.visible_kv_lens.clamp_(max=max(0, composed.max_visible_kv_len - 1))
    error = float((world.forward().double() - expected).abs().max())
    assert not error < 500 * LIMITS[torch.float32], error


def test_what_latent_layers_are_refused_for() -> None:
    world = World(torch.bfloat16)
    impl = world.impl
    assert impl.refusal(world.layer) is None and not impl.fused_output_quant_supported(None)
    assert layer_refusal(world.layer, "DeepseekV3ForCausalLM") is None
    found = layer_refusal(SimpleNamespace(impl=impl), "KimiLinearForCausalLM")
    assert found == "SimpleNamespace (the model's own latent attention)"
    for field, value, says in (
        ("indexer", object(), "sparse attention (MLA with an indexer)"),
        ("kv_cache_dtype", "fp8_e4m3", "quantised KV cache (fp8_e4m3)"),
        ("kv_lora_rank", 1024, "latents of 1024: expected a multiple of 16 up to 512"),
    ):
        vars(impl)[field], before = value, vars(impl)[field]
        assert impl.refusal(world.layer) == says
        vars(impl)[field] = before
