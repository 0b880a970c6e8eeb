// Mamba2 (SSD) of rows that position-independent caching treats itself.  See mamba2.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

#include "program.h"
#include "state_type.h"

namespace hypic {

// One layer's inputs, weights and caches.  Strides count elements; heads and their elements are contiguous.
struct Mamba2Layer {
  // Rows of the batch, bf16 or float: x, B, C before the convolution [rows, H P + 2 G N], step sizes [rows, H].
  bool bf16;
  const void *mixed, *dt;
  ptrdiff_t mixed_stride, dt_stride;
  void* out;  // [rows, H, P], bf16 or float like the inputs
  ptrdiff_t out_stride;

  int groups, heads, P, N, taps;
  ptrdiff_t channels;
  const float* weight;   // [taps, channels]
  const float* bias;     // [channels] or null
  const float* rate;     // [H] A
  const float* dt_bias;  // [H]
  const float* D;        // [H]

  // vLLM's caches, by slot: the last taps - 1 inputs of the convolution (bf16 or float like the inputs), S [H, P, N].
  void* conv;
  ptrdiff_t conv_slot, conv_row, conv_channel;
  void* state;
  StateType state_type;
  ptrdiff_t state_slot;
  const int32_t* slots;  // [batch rows]
};

// One layer's records, by slot.
struct Mamba2Records {
  float* state;           // [slots, H, P, N]
  void* tail;             // [slots, taps - 1, channels] like the inputs
  float* log_transition;  // [slots, H]
};

// What an interior carries between passes, of all heads: of its rows so far log T and the state from zero.
struct Mamba2Carry {
  double* log_transition;  // [H]
  float* state;            // [H, P, N]
};

struct Mamba2Segments {
  Mamba2Layer layer;
  Mamba2Records records;
  const SegmentRow* rows;
  const Mamba2Carry* carries;
};

struct Mamba2Compose {
  Mamba2Layer layer;
  Mamba2Records records;
  const ComposeRow* rows;
  const ComposeOp* ops;
};

struct Mamba2Kernels {
  size_t (*scratch)(const Mamba2Layer&, int heads);  // bytes for a task of so many heads of one group
  // Heads [head, head + heads) of one group, of one request.  `*_caches` writes what no head owns.
  void (*segments)(const Mamba2Segments&, int request, int head, int heads, void* scratch);
  void (*segments_caches)(const Mamba2Segments&, int request);
  void (*compose)(const Mamba2Compose&, int request, int head, int heads, void* scratch);
  void (*compose_caches)(const Mamba2Compose&, int request);
};

}  // namespace hypic
