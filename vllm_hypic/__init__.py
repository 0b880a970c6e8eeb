"""Position-independent caching for hybrid-attention LLMs, as a plugin of stock vLLM."""


def register() -> None:
    """vLLM general plugin entry point."""
