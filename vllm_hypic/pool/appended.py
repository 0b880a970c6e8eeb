"""Join a record with the record of the tokens before it: ``T <- T T_base``, ``S <- T S_base + S``.

A segment with checkpoints adds up its stretches this way.  The join runs once for each stretch of some
hundred tokens, so PyTorch is fast enough on every device.
"""

from __future__ import annotations

import torch

from .tensors import ConvRecords, DecayRecords, DiagonalRecords, LinearRecords, RetentionRecords, StateRecords
from .transition_blocks import NO_BLOCK


def append(records: StateRecords, slot: int, base: int, dead_transition: float) -> None:
    """Prepend the record in slot ``base`` to the record in ``slot``, whose tokens follow the base's tokens.

    Products are in float32; T is rounded to its dtype.  A head whose transition has no entry above
    ``dead_transition`` is dead.  Raises ``TypeError`` for diagonal transitions, which only their layer knows.
    """
    match records:
        case LinearRecords():
            _append_matrices(records, slot, base, dead_transition)
        case DecayRecords() | RetentionRecords():
            log = records.log_transition[slot]
            decay = log.exp().view(*log.shape, *[1] * (records.state.dim() - 1 - log.dim()))
            append_diagonal(records.state, decay, slot, base)
            log += records.log_transition[base]
        case ConvRecords():
            pass  # a stretch overwrites the state
        case DiagonalRecords():
            raise TypeError("DiagonalRecords hold no transition to extend")


def append_diagonal(state: torch.Tensor, decay: torch.Tensor, slot: int, base: int) -> None:
    """``state[slot] += decay * state[base]``; ``decay`` is broadcast."""
    state[slot] += decay * state[base]


def _append_matrices(records: LinearRecords, slot: int, base: int, dead_transition: float) -> None:
    own, before = records.transition(slot).float(), records.transition(base).float()
    state = records.state
    state[slot] = torch.baddbmm(state[slot], own, state[base])
    both = torch.bmm(own, before).to(records.transitions.dtype)
    blocks, stored = records.block_of[slot], records.transitions
    live = blocks >= 0
    # The host does not ask a device that runs behind which heads are live.  For each dead head, the code
    # writes a live head's block again, or a block's old content.
    any_live = blocks.argmax(0, keepdim=True)  # without keepdim, indexing would read the number on the host
    spare = torch.where(live[any_live, None, None], both[any_live], stored[:1])
    rows = torch.where(live, blocks, blocks[any_live].clamp(min=0)).long()
    stored[rows] = torch.where(live[:, None, None], both, spare)
    blocks.masked_fill_(both.abs().amax(dim=(1, 2)) <= dead_transition, NO_BLOCK)
