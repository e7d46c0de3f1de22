"""The rules: pure functions from the records of a checkpoint to findings."""
