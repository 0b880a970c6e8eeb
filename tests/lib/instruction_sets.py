"""What tests need of the CPU."""

import pytest
import torch

needs_avx512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="this CPU has no AVX-512, which vLLM's kernels for FP8 caches and quantised weights need",
)
