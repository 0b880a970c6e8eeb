#include "dispatch.h"

#include <c10/util/Exception.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace hypic {
namespace {

// Linux gives a process the registers of AMX when it asks for them.
bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2): ARCH_REQ_XCOMP_PERM
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool runs(const Kernels& k) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
  if (&k == &kernels_avx2) return true;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return false;
  if (&k == &kernels_avx512) return true;
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  return &k == &kernels_avx512_bf16 || may_use_tiles();
}

const Kernels& choose() {
  const Kernels* all[] = {&kernels_amx, &kernels_avx512_bf16, &kernels_avx512, &kernels_avx2};
  const char* wanted = std::getenv("HYPIC_ISA");
  for (const Kernels* k : all) {
    if (wanted && *wanted && std::strcmp(wanted, k->name) != 0) continue;
    if (runs(*k)) return *k;
    TORCH_CHECK(!(wanted && *wanted), "HYPIC_ISA=", wanted, ": this machine does not run it");
  }
  TORCH_CHECK(!(wanted && *wanted), "HYPIC_ISA=", wanted, ": expected one of amx, avx512_bf16, avx512, avx2");
  TORCH_CHECK(false, "the kernels of vllm-hypic need AVX2 and FMA");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace hypic
