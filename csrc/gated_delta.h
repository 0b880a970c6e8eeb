// Gated delta rule of rows that position-independent caching treats itself.  See gated_delta.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

#include "program.h"

namespace hypic {

// One layer's inputs, weights and caches.  Strides count elements; heads and their elements are contiguous.
struct GdnLayer {
  // Rows of the batch, bf16 or float: q, k, v before the convolution [rows, 2 Hk K + Hv V], gates [rows, Hv], or
  // `a` [rows, Hv, K], a gate for every channel of K.
  bool bf16;
  const void *mixed, *a, *b;
  ptrdiff_t mixed_stride, a_stride, b_stride;
  void* out;  // [rows, Hv, V], bf16 or float like the inputs
  ptrdiff_t out_stride;

  int key_heads, value_heads, K, V, taps;
  float eps;  // of the l2 norm
  float largest_beta;  // beta = largest_beta sigmoid(b)
  bool channel_gates;
  float gate_bound;  // of channels: g = gate_bound sigmoid(-rate (a + dt_bias)); 0: g = rate softplus(a + dt_bias)
  ptrdiff_t channels;
  const float* weight;   // [taps, channels]
  const float* bias;     // [channels] or null
  const float* rate;     // [Hv] -exp(A_log)
  const float* dt_bias;  // [Hv] or, of channels, [Hv, K]

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
