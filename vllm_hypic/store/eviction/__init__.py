"""What leaves when a budget is full: policies, FLOPs of a model, tuning, replay."""
