"""Which versions go together: the catalogue, the solver, the lock and the collecting of what it names."""
