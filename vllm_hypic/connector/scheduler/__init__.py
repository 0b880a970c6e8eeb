"""The connector's half in the scheduler: it tracks cached records and their requests, and orders the
workers."""
