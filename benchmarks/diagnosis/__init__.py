"""The proof suite: faults that people met, rebuilt small, and what nanprobe and its peers name on them."""
