"""Plans, convolution and parts of kernels for all linear layers; any import from here imports Triton."""
