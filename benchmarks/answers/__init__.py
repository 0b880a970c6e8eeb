"""What reuse costs in answers, in questions and texts of which the right answer is known."""
