// What a linear layer's operators do: the rows of vllm_hypic/backends/ops/program.py.
#pragma once

#include <cstdint>

namespace hypic {

struct SegmentRow {
  int64_t batch_row, resumed;  // which request, and whether it has a state from an earlier pass
  int64_t first, stop;         // its rows in this pass
  int64_t begin, end;          // those of them that belong to the interior
  int64_t slot;                // of its record
  int64_t leading;             // no T: nothing stands before this segment
  int64_t begins, ends;        // the interior does so in this pass
  int64_t has_head;            // rows precede the interior, in whatever pass
  int64_t carry;               // index of what is carried between passes, -1: nothing is
};

struct ComposeRow {
  int64_t batch_row, resumed;
  int64_t first_op, stop_op;
};

enum ComposeMode : int64_t {
  compose_none = 0,
  compose_replace = 1,
  compose_transition = 2,
  compose_add = 3,
  compose_restore = 4  // the state becomes what it was before the rows
};

inline bool applies_record(int64_t mode) { return mode != compose_none && mode != compose_restore; }

// Run rows [first, first + count) (perhaps none), then apply a record, or do as `mode` says.
struct ComposeOp {
  int64_t first, count;
  int64_t slot, mode;
};

}  // namespace hypic
