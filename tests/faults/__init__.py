"""Real servers with real tiers that crash, fill up, hang and come back."""
