"""Placement of recurrent states in a record: the optimal rule, and the depths that requests share."""
