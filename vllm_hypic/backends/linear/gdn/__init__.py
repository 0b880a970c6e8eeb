"""Gated DeltaNet (Qwen3-Next, Qwen3.5 and their MoE forms)."""
