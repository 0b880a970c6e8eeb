"""The CUDA path: vLLM's FlashAttention and gated delta net with a public part, by Triton operators."""
