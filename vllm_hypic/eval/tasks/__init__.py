"""Families of tasks, one a file: ``make(first, count, ...)`` gives the tasks ``first``, ``first + 1``, ...

The same number is the same task in every run.
"""
