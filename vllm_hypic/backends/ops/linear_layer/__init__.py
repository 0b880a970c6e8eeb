"""Code that the operators of linear layers share on CUDA: `limits`, and `triton`, which imports Triton."""
