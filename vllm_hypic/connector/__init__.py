"""KV connector: the facade vLLM calls, its scheduler and worker halves, the public pool."""
