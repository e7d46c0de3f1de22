"""From what a replay wrote down to what it means: pure functions of records."""
