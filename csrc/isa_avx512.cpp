// The kernels compiled for avx512.
#include "dispatch.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define HYPIC_ISA avx512
#define HYPIC_WIDTH 16
#define HYPIC_BF16 0

#include "simd.h"

#include "decay_attention.inl"
#include "gated_delta.inl"
#include "mamba1.inl"
#include "mamba2.inl"
#include "span_attention.inl"

namespace hypic {

const Kernels kernels_avx512 = {
    "avx512",
    {avx512::span_scratch, avx512::span_part},
    {avx512::decay_scratch, avx512::decay_segments, avx512::decay_compose},
    {avx512::gdn_scratch, avx512::gdn_segments, avx512::gdn_segments_caches, avx512::gdn_compose, avx512::gdn_compose_caches},
    {avx512::mamba1_scratch, avx512::mamba1_segments, avx512::mamba1_compose},
    {avx512::mamba2_scratch, avx512::mamba2_segments, avx512::mamba2_segments_caches, avx512::mamba2_compose,
     avx512::mamba2_compose_caches},
};

}  // namespace hypic
