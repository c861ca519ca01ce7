"""Slurm: the queue of the cluster, and PBS job scripts on it."""
