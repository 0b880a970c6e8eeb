"""The connector's half in a worker: its pool, and records on their way between pool, tiers and instances."""
