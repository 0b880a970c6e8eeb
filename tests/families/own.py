"""What is to be shown of Mamba's layers, of short convolutions, of windows, and of layers that share K and V,
each alone.  ``lightning.py`` and ``mla.py`` have what is to be shown of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.conftest import CONTEXT
from engine.engines import Ask, EngineError, worker_of
from engine.test_contexts_and_islands import ISLANDS, forget_streams, islands_of
from engine.test_oracle_agreement import KL_FACTOR, distance

from .contract import BEHIND_A_TAIL, COMPOSED, ONE_TOKEN, Served, first_token, largest

# -- Mamba -----------------------------------------------------------------------------------------------


def forget_transitions(llm: Any) -> int:
    """Makes the transition of all records 1; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        # Mamba1 keeps the time that a segment takes, Mamba2 a number a head.
        (records.elapsed if hasattr(records, "elapsed") else records.log_transition).zero_()
    return len(pool.linear)


def transitions_are_the_records(served: Served) -> None:
    """Without those of the records an answer is that of a request that says `naive`."""
    served.engine.reset()
    right = first_token(served.engine, COMPOSED)
    assert served.engine.call(forget_transitions)
    served.engine.call(forget_streams)
    forgotten = first_token(served.engine, COMPOSED)
    naive = first_token(served.engine, replace(COMPOSED, extra={"hypic_link": "naive"}))
    served.engine.reset()
    assert torch.equal(forgotten, naive), "transitions come from elsewhere than the records"
    assert not torch.equal(forgotten, right)


def rows_apart(llm: Any) -> list[bool]:
    """Stock code over a batch of two decodes and three prefills, one of which goes on, and over two
    sub-batches of it: whether outputs and both states have the same bits."""
    from vllm.forward_context import set_forward_context

    from vllm_hypic.backends.linear.layout import StockRows
    from vllm_hypic.backends.linear.mamba2.cpu import HypicCPUMamba2, ProjectedRows

    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    layer = next(found for found in layers if isinstance(found, HypicCPUMamba2))
    starts, computed = [0, 1, 2, 72, 77, 107], [130, 7, 0, 64, 0]
    width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    rng = torch.Generator().manual_seed(0)
    dtype = layer.conv_weights.dtype
    x = ProjectedRows(torch.randn(starts[-1], width, generator=rng).to(dtype))
    before = [torch.randn(state[1:6].shape, generator=rng).to(state.dtype) for state in layer.kv_cache]

    class Whole:
        state_indices_tensor_d = torch.tensor([[1], [2]], dtype=torch.int32)
        state_indices_tensor_p = torch.tensor([3, 4, 5], dtype=torch.int32)
        seq_lens, chunk_size = torch.full((5,), 200), 128

    def run(requests: list[int]) -> list[torch.Tensor]:
        for state, values in zip(layer.kv_cache, before, strict=True):
            state[1:6] = values
        spans = [torch.arange(starts[i], starts[i + 1]) for i in requests]
        ends = torch.tensor([0, *map(len, spans)]).cumsum(0).tolist()
        rows = StockRows(
            sum(i < 2 for i in requests), torch.cat(spans), ends, requests, [computed[i] for i in requests]
        )
        out = torch.zeros(ends[-1], layer.tped_intermediate_size, dtype=dtype)
        metadata = layer.sub_batch(NotImplemented, Whole, rows)
        with set_forward_context({layer.prefix: metadata}, config), torch.inference_mode():
            layer.run_stock(x.part(rows.tokens), out)
        slots = torch.tensor(requests) + 1
        return [*out.split([len(s) for s in spans]), *(state[slots] for state in layer.kv_cache)]

    outputs = run([*range(5)])
    *whole, conv, ssm = outputs
    found = []
    for requests in ([0, 3], [1, 2, 4]):
        *apart, its_conv, its_ssm = run(requests)
        found += [torch.equal(whole[i], y) for i, y in zip(requests, apart, strict=True)]
        found += [torch.equal(conv[requests], its_conv), torch.equal(ssm[requests], its_ssm)]
    return found


def rows_apart_have_stock_bits(served: Served) -> None:
    served.engine.reset()
    assert served.engine.call(rows_apart) == [True] * 9


# -- short convolutions: a segment overwrites the state, so a record is its last inputs ------------------


def forget_tails(llm: Any, slots: Any = slice(None)) -> int:
    """Zeroes the tails of all records; how many layers had some."""
    pool = worker_of(llm).runtime.pool
    for records in pool.linear.values():
        records.conv_tail[slots] = 0
    return len(pool.linear)


def tails_are_the_records(served: Served) -> None:
    served.engine.reset()
    theirs = served.oracle.next_token_logprobs(*ONE_TOKEN.parts, head=8, tail=0)
    assert largest(first_token(served.engine, BEHIND_A_TAIL), theirs) <= served.bound
    (warm,) = served.engine.ask(BEHIND_A_TAIL)
    assert warm.cached > 500
    assert served.engine.call(forget_tails) == 3
    found = largest(first_token(served.engine, BEHIND_A_TAIL), theirs)
    served.engine.reset()
    assert found > 5 * served.bound, f"a forgotten tail goes unseen: {found:.1e}"


def naive_is_refused(served: Served) -> None:
    """It leaves a transition out, and there is none."""
    with pytest.raises(EngineError, match="'naive' leaves out the transition"):
        served.engine.ask(replace(COMPOSED, extra={"hypic_link": "naive"}))


# -- windows, and layers that share K and V --------------------------------------------------------------


def islands_behind_a_text(served: Served) -> None:
    """Records with a context, and recomputed windows inside them."""
    extra = {"hypic_context": "text", "hypic_islands": ISLANDS}
    ours, theirs = [], []
    for text in (text.asking() for text in served.texts):
        islands = served.engine.call(islands_of, text.tokens, extra)
        assert any(islands.values())
        ours.append(first_token(served.engine, Ask(text.tokens, extra=extra)))
        theirs.append(served.oracle.next_token_logprobs(*text.parts, context=CONTEXT, islands=islands))
    assert served.weighed(distance(ours, theirs)) <= served.bound


def a_window_is_what_stock_says(served: Served) -> None:
    """Ordinary requests against windows one token longer or shorter: off by one would be seen."""
    ours = [first_token(served.engine, Ask(tuple(text.whole))) for text in served.texts]
    exact, noise = served.oracle.config["sliding_window"], served.ordinary()
    for window in (exact - 1, exact + 1):
        served.oracle.config["sliding_window"] = window
        try:
            found = distance(ours, [served.oracle.full_logprobs(text.whole) for text in served.texts])
        finally:
            served.oracle.config["sliding_window"] = exact
        assert found.kl > 4 * KL_FACTOR * noise.kl


def owners(llm: Any) -> tuple[list[str], int, int]:
    """Layers that records hold K and V of, and bytes of a token: in them, and as the pool counts them."""
    geometry = worker_of(llm).geometry
    each = sum(2 * a.kv_heads * a.head_size * a.dtype.itemsize for a in geometry.attention)
    return [a.layer for a in geometry.attention], each, geometry.page_bytes // geometry.page_tokens


def records_hold_what_layers_own(served: Served) -> None:
    """The last two of five layers read what others have."""
    layers, each, counted = served.engine.call(owners)
    assert [layer.split(".")[2] for layer in layers] == ["0", "1", "2"] and each == counted
