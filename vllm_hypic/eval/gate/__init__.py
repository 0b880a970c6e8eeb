"""The gate, which judges whether reuse is good enough on a model at given settings.

fixed set of tasks -> full recompute, reuse, noise -> numbers -> verdict with reasons -> sign-off
sign-off -> one line of the log, or a refusal, when a server starts

The package imports neither torch nor vLLM before it looks at an engine's configuration.
"""
