"""What tensors hold and how far two of them are apart: statistics, differences, and walking nested values."""
