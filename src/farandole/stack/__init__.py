"""Choose versions that work together: the catalogue, the solver, the lock, and fetching what the lock names."""
