"""Token primitives: tokens -> :class:`~vllm_hypic.primitives.plan.PromptPlan`.

Imports neither torch nor vllm.
"""
