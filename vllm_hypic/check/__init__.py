"""``vllm-hypic check``: would this model be served, read from its configuration alone."""
