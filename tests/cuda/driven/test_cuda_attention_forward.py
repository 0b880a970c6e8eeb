"""The CUDA attention implementation's forward pass, on the CPU: what it hands to whom, and what comes out.

A batch of plain rows, composed rows and captured rows (``attention_world.py``) must give full attention.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_world import BLOCK, CPU, KV_HEADS, LIMITS, SCALES, SIZE, SLOTS, TABLE, World, install, stand_in
from vllm.v1.attention.backends import flash_attn

from vllm_hypic.backends.attention import cuda_rows as shared_rows
from vllm_hypic.backends.attention.cuda import HypicCUDAAttentionImpl
from vllm_hypic.backends.ops.kept_lse import KEPT
from vllm_hypic.backends.ops.span_attention.eager import rotate, unrotate
from vllm_hypic.backends.ops.span_attention.plan import causal_kv_lens
from vllm_hypic.pool.step import AttentionRows, Batch, StepContext


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashAttention is the stand-in; of each call whether its log-sum-exp was asked for."""
    calls = list[bool]()

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(bool(kwargs.get("return_softmax_lse")))
        return stand_in(*args, **kwargs)

    install(monkeypatch, called)
    return calls


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "table", "kind"),
    [
        (F32, True, {}),
        (F32, True, {"neox": False}),
        (F32, False, {}),
        (BF16, True, {}),
        (F32, True, {"sinks": True}),
    ],
    ids=str,
)
def test_a_mixed_batch_gets_full_attention(dtype: torch.dtype, table: bool, kind: dict[str, Any]) -> None:
    World(dtype, TABLE if table else None, **kind).check()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("window", [None, 3, 20, 30, 64])
def test_fp8_counts_times_its_scales(window: int | None, drafts: int) -> None:
    kind: dict[str, Any] = {"window": window, "drafts": drafts, "sinks": True, "scales": SCALES}
    world = World(BF16, TABLE, **kind)
    expected = world.expected()
    world.check(expected=expected)
    for scale in range(3):
        wrong = [*SCALES]
        wrong[scale] *= 1.3
        other = World(BF16, TABLE, **kind)
        link: Any = other.impl.link
        of_layer = replace(link.scales, query=wrong[0], key=wrong[1], value=wrong[2])
        of_records = replace(link.public, key_scale=wrong[1], value_scale=wrong[2])
        other.impl.link = replace(link, scales=of_layer, public=of_records)
        assert not (other.forward().double() - expected).abs().max() < 2 * LIMITS[BF16]


def test_what_is_captured_is_fp8() -> None:
    world = World(BF16, TABLE, scales=SCALES)
    world.forward()
    rows, slots = world.step.captured.rows, world.step.captured.slots  # type: ignore[union-attr]
    key = unrotate(world.key[rows], world.table, world.step.captured.positions, True)  # type: ignore[union-attr]
    for found, given, scale in (
        (world.public.key, key, SCALES[1]),
        (world.public.value, world.value[rows], SCALES[2]),
    ):
        error = (found[slots].float() * scale - given.float()).abs() / given.float().abs().clamp(min=scale)
        assert error.max() <= 2**-4 + 2**-8, error.max()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [*((window, torch.float32) for window in (1, 3, 12, 20, 30, 64)), (20, torch.bfloat16)],
)
def test_windows_are_measured_in_the_prompt(window: int, dtype: torch.dtype, sinks: bool) -> None:
    """Windows that hide all that is public, some of it from both composed requests, from one, from none."""
    world = World(dtype, TABLE, window=window, sinks=sinks)
    world.check()
    rows = world.step.attention_rows(window, 0)
    assert (rows.merged is None, rows.replaced is None) == (window < 30, window == 64)


def test_where_all_rows_are_replaced_stock_does_not_run() -> None:
    world = World(F32, TABLE, window=3, sinks=True)
    expected = world.expected()
    far = world.step.attention_rows(3, 0).replaced
    assert far is not None and 0 not in far.rows
    # A batch that has no other rows: that of the plain request is left out.
    world.step = replace(world.step, batch=Batch([0, len(far.rows)], [0]), _attention_rows={})
    world.runtime.step = world.step
    output = world.forward()
    assert output[0].isnan().all()
    error = (output.double() - expected)[far.rows].abs().max()
    assert error < LIMITS[F32], error


@pytest.mark.parametrize("window", [None, 20], ids=["", "window"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_are_attended_to_by_those_behind_them_alone(drafts: int, window: int | None) -> None:
    """What the first row of a composed request that decodes sees does not depend on its drafts."""
    world = World(F32, TABLE, window=window, drafts=drafts)
    found = world.check()
    first = world.starts[3]
    world.private[3][0][18:].add_(1)
    assert (found.double() - world.expected())[first].abs().max() < LIMITS[F32]
    assert (found.double() - world.expected())[first + 1].abs().max() > 10 * LIMITS[F32]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["distances in the stream", "sinks forgotten", "sinks counted twice"])
def test_a_fault_of_windows_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(F32, TABLE, window=20, sinks=True)
    expected = world.expected()
    match fault:
        case "distances in the stream":
            far = world.step.attention_rows(20, 0).replaced
            own = torch.from_numpy(causal_kv_lens(far.public.cache_ranges.numpy())) - 1
            nothing = torch.zeros_like(own)
            far = replace(far, hidden_columns=nothing, hidden_tokens=(own - 19).clamp(min=0))
            rows = AttentionRows(None, far, all_replaced=False)
            monkeypatch.setattr(StepContext, "attention_rows", lambda *_: rows)
        case "sinks forgotten":
            world.impl.sinks = None
        case "sinks counted twice":
            world.impl.sinks = world.impl.sinks + math.log(2)
    error = (world.forward().double() - expected).abs().max()
    assert error > 1000 * LIMITS[F32], error


@pytest.mark.parametrize("window", [None, 20], ids=["", "window and sinks"])
def test_pieces_give_the_same_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every row, across requests."""
    monkeypatch.setattr(shared_rows, "PARTIAL_BYTES", -1)
    monkeypatch.setattr(shared_rows, "SHORTEST", 1)
    world = World(F32, TABLE, window=window, sinks=window is not None)
    world.check()
    public = world.step.attention_rows(None, 0).merged
    if window is None:
        pieces = shared_rows.span_pieces(world.runtime, world.step, public, world.impl.heads(world.query))
        assert len(pieces) == 8


def test_plain_rows_keep_the_bits_of_the_stock_implementation() -> None:
    world = World(BF16, TABLE)
    ours = world.forward()
    world.impl.link = None
    stock = world.forward()
    plain = [0, *range(world.starts[2], world.starts[3]), *range(world.starts[4], world.starts[5])]
    assert torch.equal(ours[plain], stock[plain])
    composed = [*range(world.starts[1] + 1, world.starts[2]), world.starts[3]]
    assert not torch.isclose(ours[composed], stock[composed]).all(dim=(1, 2)).any(), "nothing was composed"


@pytest.mark.parametrize("drafts", [0, 2])
def test_flash_attention_is_called_once(asked: list[bool], drafts: int) -> None:
    """The stock call leaves its log-sum-exp; in passes of plain rows it is not asked for."""
    world = World(F32, TABLE, drafts=drafts)
    world.check()
    assert asked == [True]
    world.runtime.step = None
    world.forward()
    assert asked == [True, False]
    assert KEPT.lse is None and not KEPT.wanted


@pytest.mark.parametrize(("sinks", "version"), [(True, 2), (False, 4)], ids=["sinks", "4"])
def test_a_log_sum_exp_that_stock_does_not_leave_is_asked_for_again(
    asked: list[bool], sinks: bool, version: int
) -> None:
    """FlashAttention 4 has none unless asked, and with sinks it is not known whether they are in it."""
    world = World(F32, TABLE, sinks=sinks)
    assert world.impl.keeps_lse is not sinks
    world.impl.vllm_flash_attn_version = version
    assert not world.impl.keeps_lse
    world.check()
    assert asked == [False, True]


def test_what_is_kept_is_the_threads_own() -> None:
    """Another thread's stock call does not see that this one asks."""
    with ThreadPoolExecutor(1) as other:
        KEPT.wanted = True
        try:
            assert not other.submit(lambda: KEPT.wanted).result()
        finally:
            KEPT.wanted = False


def test_interiors_are_captured_unrotated() -> None:
    world = World(F32, TABLE)
    raw = torch.randn(5, KV_HEADS, SIZE)
    rows = slice(world.starts[2], world.starts[2] + 5)
    world.key[rows] = rotate(raw, world.table[world.capture_positions], True)
    world.forward()
    slots = torch.from_numpy(world.capture_slots)[1:6]
    torch.testing.assert_close(world.public.key[slots], raw, atol=1e-5, rtol=1e-5)
    assert torch.equal(world.public.value[slots], world.value[rows])
    used = torch.cat([*world.columns, slots])
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, used, False)
    assert world.public.key[others].isnan().all(), "slots of nobody were written"
    assert world.runtime.calls == {"capture_kv": 1, "span_attention": 1}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["tokens", "rows", "blocks", "positions", "visible_kv_lens"])
def test_a_fault_would_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is larger than what is tolerated."""
    world = World(F32, TABLE)
    expected = world.expected()
    match fault:
        case "tokens":  # FlashAttention told of one token too few, when it is called again
            public = world.step.attention_rows(None, 0).merged
            public.cache_ranges[:, 3] -= 1
            monkeypatch.setattr(HypicCUDAAttentionImpl, "keeps_lse", False)
        case "rows":  # the log-sum-exp of the row before
            stock = flash_attn.flash_attn_varlen_func

            def rolled(**given: Any) -> Any:
                out, lse = stock(**given)
                return out, lse.roll(1, 1)

            monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", rolled)
        case "blocks":  # the wrong request's blocks
            metadata = world.metadata
            world.metadata = replace(metadata, block_table=metadata.block_table.roll(1, 0).contiguous())
            world.metadata.seq_lens.fill_(BLOCK)
        case "positions":  # public K rotated as if it stood elsewhere
            for composed in world.step.composed:
                composed.stream.kv_positions += 1
        case "visible_kv_lens":
            for composed in world.step.composed:
                composed.visible_kv_lens.clamp_(max=max(0, int(composed.visible_kv_lens.max()) - 1))
    try:
        error = (world.forward().double() - expected).abs().max()
    except AssertionError:
        return
    assert not error < 10 * LIMITS[F32]


def test_plans_are_made_once_a_pass_and_columns_once_for_the_same_requests() -> None:
    world = World(F32, None)
    world.forward()
    plans = world.step.shared.of(shared_rows._SharedPlans)
    first = [made for _, made in plans._made.values()]
    world.forward()
    again = [made for _, made in plans._made.values()]
    assert len(first) == len(again) == 2 and all(a is b for a, b in zip(first, again, strict=True))
    assert world.step.shared.of(shared_rows._SharedPlans) is plans
    kept = world.runtime.shared.of(shared_rows._KeptColumns).kept
    [(_, columns)] = kept.values()
    world.runtime.step = StepContext(world.step.composed, [], CPU, world.step.batch)
    world.forward()
    assert [made for _, made in kept.values()] == [columns]
    world.runtime.step = StepContext(world.step.composed[:1], [], CPU, world.step.batch)
    world.forward()
    [(_, other)] = kept.values()
    assert other is not columns
