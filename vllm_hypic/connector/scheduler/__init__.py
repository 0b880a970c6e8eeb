"""The connector's half in the scheduler: tracks records and requests, and orders the workers."""
