"""``vllm-hypic suggest``: what each way of finding segments would have reused of recorded requests."""
