"""``vllm-hypic router``: an OpenAI-compatible front that lets many instances prefill cold segments.

``completions.py`` leads a completion request through these modules: ``prompt.py`` (text to tokenise) ->
``plan.py`` (the engine's own plan) -> ``assign.py`` (missing records, and a worker for each) ->
``transfers.py`` (segment requests and their faults) beside ``upstream.py`` (the composed request) -> the
client, byte for byte.  ``instances.py`` holds the state of the instances; ``watch.py`` keeps it up to date.
The router keeps nothing on disk, and imports neither vLLM nor torch.
"""
