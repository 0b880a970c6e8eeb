"""Families of tasks, with a module for each family.

Tasks have numbers, and the same number is the same task in every run.
"""
