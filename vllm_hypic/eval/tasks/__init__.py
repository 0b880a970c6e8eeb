"""Families of tasks: each module makes :class:`~vllm_hypic.eval.task.Task`s from seeds or files."""
