// Gated delta rule of rows that position-independent caching treats itself.  See gated_delta.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hypic {

// One layer's inputs, weights and caches.  Strides count elements; heads and their elements are contiguous.
struct GdnLayer {
  // Rows of the batch, bf16 or float: q, k, v before the convolution [rows, 2 Hk K + Hv V], gates [rows, Hv].
  bool bf16;
  const void *mixed, *a, *b;
  ptrdiff_t mixed_stride, a_stride, b_stride;
  void* out;  // [rows, Hv, V], bf16 or float like the inputs
  ptrdiff_t out_stride;

  int key_heads, value_heads, K, V, taps;
  float eps;  // of the l2 norm
  ptrdiff_t channels;
  const float* weight;   // [taps, channels]
  const float* bias;     // [channels] or null
  const float* rate;     // [Hv] -exp(A_log)
  const float* dt_bias;  // [Hv]

  // vLLM's caches, by slot: the last taps - 1 inputs of the convolution (bf16 or float like the inputs), S [Hv, K, V].
  void* conv;
  ptrdiff_t conv_slot, conv_row, conv_channel;
  float* state;
  ptrdiff_t state_slot;
  const int32_t* slots;  // [batch rows]
};

// One layer's records, by slot.
struct GdnRecords {
  float* state;      // [slots, Hv, K, V]
  void* tail;        // [slots, taps - 1, channels] like the inputs
  uint16_t* transitions;   // [blocks, K, K] fp16
  int32_t* block_of;  // [slots, Hv]: the transition block that holds a head's T, -1: T is zero
};

// Columns of a program's rows; vllm_hypic/backends/ops/program.py builds them.
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

// What an interior carries between passes, of all heads.
struct GdnCarry {
  float* transition;  // [Hv, K, K]
  float* head;        // [Hv, K, V] the state where the interior began
  int32_t* alive;     // [Hv]
};

struct GdnSegments {
  GdnLayer layer;
  GdnRecords records;
  const SegmentRow* rows;
  const GdnCarry* carries;
  float dead_below;  // T of a head whose elements are all smaller counts as zero
};

struct GdnCompose {
  GdnLayer layer;
  GdnRecords records;
  const ComposeRow* rows;
  const ComposeOp* ops;
};

struct GdnKernels {
  size_t (*scratch)(const GdnLayer&, int heads);  // bytes for a task of so many value heads of one key head
  // Value heads [head, head + heads) of one key head, of one request.  `*_caches` writes what no head owns.
  void (*segments)(const GdnSegments&, int request, int head, int heads, void* scratch);
  void (*segments_caches)(const GdnSegments&, int request);
  void (*compose)(const GdnCompose&, int request, int head, int heads, void* scratch);
  void (*compose_caches)(const GdnCompose&, int request);
};

}  // namespace hypic
