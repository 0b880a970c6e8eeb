"""The gate: is reuse good enough on this model, at these settings?

fixed set of tasks -> full recompute, reuse, noise -> numbers -> verdict with reasons -> sign-off
sign-off -> one line of the log, or a refusal, when a server starts

Imports neither torch nor vLLM until an engine's configuration is looked at.
"""
