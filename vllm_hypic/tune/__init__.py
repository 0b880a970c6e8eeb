"""``vllm-hypic tune``: trains the K and V of the context behind which records are computed."""
