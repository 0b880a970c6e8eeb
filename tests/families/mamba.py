"""What is to be shown of Mamba's layers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from engine.engines import worker_of
from engine.test_contexts_and_islands import forget_streams

from .contract import COMPOSED, Served, first_token


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
