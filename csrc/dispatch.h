// One table of kernels per instruction set; the best one that this machine has is chosen at run time.
#pragma once

#include "decay_attention.h"
#include "gated_delta.h"
#include "mamba1.h"
#include "mamba2.h"
#include "span_attention.h"

namespace hypic {

struct Kernels {
  const char* name;
  SpanKernels span;
  DecayKernels decay;
  GdnKernels gdn;
  Mamba1Kernels mamba1;
  Mamba2Kernels mamba2;
};

extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;

// The table in use: the best this machine runs, or the one named by the environment variable HYPIC_ISA.
const Kernels& kernels();

}  // namespace hypic
