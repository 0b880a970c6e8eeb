"""Planning, convolution and pieces of kernels of all linear layers; importing any module imports Triton."""
