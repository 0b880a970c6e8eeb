"""Code that the operators of linear layers share: `arguments`, and on CUDA `limits` and `triton`. Imports of
`triton` import Triton."""
