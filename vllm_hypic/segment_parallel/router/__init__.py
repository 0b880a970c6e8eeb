"""``vllm-hypic router``: an OpenAI-compatible front that has cold segments prefilled on many instances.

A completion request here, led by ``completions.py``: ``prompt.py`` (what to tokenise) -> ``plan.py`` (the
engine's own plan) -> ``assign.py`` (what is missing where, who computes it) -> ``transfers.py`` (segment
requests and their faults) beside ``upstream.py`` (the composed request) -> the client, byte for byte.
  ``instances.py`` is what is known
of the instances, ``watch.py`` keeps it fresh.  Nothing is kept on disk, nothing here imports vLLM or torch.
"""
