"""The folder that a run's Python looks into first."""
