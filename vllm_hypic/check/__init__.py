"""``vllm-hypic check``: says from a model's configuration alone whether the plugin serves the model."""
