"""``vllm-hypic suggest``: reports the reuse of recorded requests with each way of finding segments."""
