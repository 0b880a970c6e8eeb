"""The connector's half in the scheduler: what is cached, for whom, and what workers are asked to do."""
