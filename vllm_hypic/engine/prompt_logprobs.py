"""Turns prompt logprobs of requests with segments from rows of the stream into rows of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors

from ..patches.null_prompt_logprobs import NO_RANK
from ..primitives.plan import PromptPlan
from ..primitives.prompt_rows import PromptRows, prompt_rows
from ..primitives.tokens import PrimitiveIds

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PromptLogprobs:
    """Maps stream rows to prompt rows of requests for prompt logprobs, until their prompts are computed.

    The model runner gives one row for each stream token but the first.  The client gets one row for each
    token of the prompt as sent but the first; most of these rows are marked as null.
    """

    def __init__(self, primitives: PrimitiveIds) -> None:
        self._primitives = primitives
        self._rows: dict[str, PromptRows] = {}

    def expect(self, request: Request, ids: list[int], plan: PromptPlan) -> None:
        """Prepare the rows of a request, sent as ``ids``, if the request asks for prompt logprobs."""
        params = request.sampling_params
        if params is not None and params.prompt_logprobs is not None:
            self._rows[request.request_id] = prompt_rows(ids, plan, self._primitives)

    def of_prompt(self, request_id: str, stream: LogprobsTensors | None) -> LogprobsTensors | None:
        """Return the prompt's rows for the ``stream``'s rows; requests without segments get ``stream`` back.
        All rows are null if ``stream`` is ``None``, because no token of the prompt was computed."""
        if (rows := self._rows.get(request_id)) is None:
            return stream
        tokens = torch.tensor(rows.tokens[1:])
        columns = 1 if stream is None else stream.logprobs.shape[1]
        ids = tokens[:, None].expand(-1, columns).to(torch.int32).contiguous()
        logprobs = torch.zeros(ids.shape)
        ranks = torch.full(tokens.shape, NO_RANK, dtype=torch.int32)
        if stream is not None:
            source = torch.tensor(rows.rows, dtype=torch.int64)
            target = torch.tensor(rows.targets, dtype=torch.int64) - 1
            ids[target] = stream.logprob_token_ids[source]
            logprobs[target] = stream.logprobs[source]
            ranks[target] = stream.selected_token_ranks[source]
        return LogprobsTensors(ids, logprobs, ranks)

    def forget(self, request_id: str) -> None:
        """Drop the rows of a request that has ended."""
        self._rows.pop(request_id, None)
