"""``vllm-hypic tune``: trains the K and V of a context that records are computed behind."""
