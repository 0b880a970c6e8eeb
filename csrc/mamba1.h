// The selective scan of Mamba1, of rows behind their convolution.  See mamba1.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

#include "program.h"
#include "state_type.h"

namespace hypic {

constexpr int SCAN_CHANNELS = 16;  // side by side in a task: lanes of the widest vector

// One layer's inputs, weights and cache.  Strides count elements; channels of a row are contiguous.
struct Mamba1Layer {
  // Rows of the batch [rows, channels], bf16 or float: what is scanned, step sizes, what the outputs are gated by.
  bool bf16;
  const void *x, *dt, *gate;
  ptrdiff_t x_stride, dt_stride, gate_stride;
  const float *B, *C;  // [rows, N]
  void* out;           // [rows, channels], bf16 or float like the inputs
  ptrdiff_t out_stride;

  ptrdiff_t channels;
  int N;
  const float* rate;     // [channels, N] A
  const float* dt_bias;  // [channels]
  const float* D;        // [channels]

  void* state;  // vLLM's cache, by slot [channels, N]
  StateType state_type;
  ptrdiff_t state_slot;
  const int32_t* slots;  // [batch rows]
};

// One layer's records, by slot.
struct Mamba1Records {
  float* state;    // [slots, channels, N]
  float* elapsed;  // [slots, channels]
};

// What an interior carries between passes: of its rows so far the sum of step sizes and the state from zero.
struct Mamba1Carry {
  double* elapsed;  // [channels]
  float* state;     // [channels, N]
};

struct Mamba1Segments {
  Mamba1Layer layer;
  Mamba1Records records;
  const SegmentRow* rows;
  const Mamba1Carry* carries;
};

struct Mamba1Compose {
  Mamba1Layer layer;
  Mamba1Records records;
  const ComposeRow* rows;
  const ComposeOp* ops;
};

struct Mamba1Kernels {
  size_t (*scratch)(const Mamba1Layer&, int blocks);  // bytes for a task of so many blocks of channels
  // Blocks [block, block + blocks) of SCAN_CHANNELS channels, of one request.
  void (*segments)(const Mamba1Segments&, int request, int block, int blocks, void* scratch);
  void (*compose)(const Mamba1Compose&, int request, int block, int blocks, void* scratch);
};

}  // namespace hypic
