"""Benchmarks of the kernels and of a model's layers on one GPU: ``python -m benchmarks.gpu``.

They need torch, Triton and this package; no vLLM and no model.
"""
