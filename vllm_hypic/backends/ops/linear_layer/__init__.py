"""What the operators of linear layers share for CUDA: `limits`, and `triton`, which imports Triton."""
