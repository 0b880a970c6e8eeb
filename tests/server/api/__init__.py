"""Tests against a real ``vllm serve``."""
