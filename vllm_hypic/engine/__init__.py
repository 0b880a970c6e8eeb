"""Code in vLLM's processes beside the model: activation, scheduler, workers, front end, tokenizer."""
