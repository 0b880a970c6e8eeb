// The kernels compiled for AMX; those that have no use for it are of avx512_bf16.
#include "dispatch.h"

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#define HYPIC_ISA amx
#define HYPIC_WIDTH 16
#define HYPIC_BF16 1
#define HYPIC_TILES 1

#include "simd.h"

#include "span_attention.inl"

namespace hypic {

const Kernels kernels_amx = {
    "amx",
    {amx::span_scratch, amx::span_part},
    kernels_avx512_bf16.decay,
    kernels_avx512_bf16.gdn,
    kernels_avx512_bf16.mamba1,
    kernels_avx512_bf16.mamba2,
};

}  // namespace hypic
