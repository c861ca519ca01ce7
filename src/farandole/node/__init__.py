"""Programs that run on nodes; each needs only the standard library."""
