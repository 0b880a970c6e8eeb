// The kernels compiled for avx2.
#include "dispatch.h"

#pragma GCC target("avx2,fma,f16c")
#define HYPIC_ISA avx2
#define HYPIC_WIDTH 8
#define HYPIC_BF16 0

#include "simd.h"

#include "decay_attention.inl"
#include "gated_delta.inl"
#include "mamba1.inl"
#include "mamba2.inl"
#include "span_attention.inl"

namespace hypic {

const Kernels kernels_avx2 = {
    "avx2",
    {avx2::span_scratch, avx2::span_part},
    {avx2::decay_scratch, avx2::decay_segments, avx2::decay_compose},
    {avx2::gdn_scratch, avx2::gdn_segments, avx2::gdn_segments_caches, avx2::gdn_compose, avx2::gdn_compose_caches},
    {avx2::mamba1_scratch, avx2::mamba1_segments, avx2::mamba1_compose},
    {avx2::mamba2_scratch, avx2::mamba2_segments, avx2::mamba2_segments_caches, avx2::mamba2_compose,
     avx2::mamba2_compose_caches},
};

}  // namespace hypic
