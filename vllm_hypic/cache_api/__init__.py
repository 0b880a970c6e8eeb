"""The explicit cache API: segments with ids, over HTTP (server side and client) and in prompts."""
