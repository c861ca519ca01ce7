"""The programs of a validation that run on nodes; a job's ranks run those that import ranks."""
