// Linear attention with decays: of heads (lightning attention, retention) or of every channel (gated linear attention).
// See decay_attention.inl for the method.
#pragma once

#include <cstddef>
#include <cstdint>

#include "program.h"
#include "state_type.h"

namespace hypic {

// Rows of a batch [rows, H, channels], whose channels are contiguous; strides count elements.
struct HeadRows {
  void* data;
  ptrdiff_t row, head;
};

// One layer's inputs and cache.
struct DecayLayer {
  bool bf16;               // q, k, v and out; else float
  HeadRows q, k, v, out;   // K, K, V and V channels
  bool channel_gates;      // g has rows, float [rows, H, K]; else it is float [H]
  HeadRows g;
  int heads, K, V;

  void* state;  // vLLM's cache, by slot [H, K, V]
  StateType state_type;
  ptrdiff_t state_slot;
  const int32_t* slots;  // [batch rows]

  // Log decays of a head.
  int decays() const { return channel_gates ? K : 1; }
};

// One layer's records, by slot.
struct DecayRecords {
  float* state;           // [slots, H, K, V]
  float* log_transition;  // [slots, H, decays]
};

// What an interior carries between passes: of its rows so far log T and the state from zero.
struct DecayCarry {
  double* log_transition;  // [H, decays]
  float* state;            // [H, K, V]
};

// By how many positions records are moved, and what that does to K.
struct DecayRelocation {
  const int64_t* shifts;  // [ops], or null: nowhere
  const float* table;     // [positions, rotated]: cosines, then sines, of the angles of rotated / 2 pairs
  int rotated;            // channels of K, the first ones
  bool neighbours;        // pairs are (2 i, 2 i + 1), else (i, i + rotated / 2)
};

struct DecaySegments {
  DecayLayer layer;
  DecayRecords records;
  const SegmentRow* rows;
  const DecayCarry* carries;
};

struct DecayCompose {
  DecayLayer layer;
  DecayRecords records;
  const ComposeRow* rows;
  const ComposeOp* ops;
  DecayRelocation relocation;
};

struct DecayKernels {
  size_t (*scratch)(const DecayLayer&, int heads);  // bytes for a task of so many heads
  // Heads [head, head + heads) of one request.
  void (*segments)(const DecaySegments&, int request, int head, int heads, void* scratch);
  void (*compose)(const DecayCompose&, int request, int head, int heads, void* scratch);
};

}  // namespace hypic
