"""Start a program on a slot with its place among the ranks, and tell whether it met the others."""
