// The kernels compiled for avx512_bf16.
#include "dispatch.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define HYPIC_ISA avx512_bf16
#define HYPIC_WIDTH 16
#define HYPIC_BF16 1

#include "simd.h"

#include "decay_attention.inl"
#include "gated_delta.inl"
#include "mamba1.inl"
#include "mamba2.inl"
#include "span_attention.inl"

namespace hypic {

const Kernels kernels_avx512_bf16 = {
    "avx512_bf16",
    {avx512_bf16::span_scratch, avx512_bf16::span_part},
    {avx512_bf16::decay_scratch, avx512_bf16::decay_segments, avx512_bf16::decay_compose},
    {avx512_bf16::gdn_scratch, avx512_bf16::gdn_segments, avx512_bf16::gdn_segments_caches, avx512_bf16::gdn_compose, avx512_bf16::gdn_compose_caches},
    {avx512_bf16::mamba1_scratch, avx512_bf16::mamba1_segments, avx512_bf16::mamba1_compose},
    {avx512_bf16::mamba2_scratch, avx512_bf16::mamba2_segments, avx512_bf16::mamba2_segments_caches, avx512_bf16::mamba2_compose,
     avx512_bf16::mamba2_compose_caches},
};

}  // namespace hypic
