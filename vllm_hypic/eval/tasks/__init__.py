"""Families of tasks.

Tasks have numbers, and the same number is the same task in every run.
"""
