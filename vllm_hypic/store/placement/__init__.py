"""Where a record keeps recurrent states: the optimal rule, and what is learned of depths."""
