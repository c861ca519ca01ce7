"""A backup of a cluster in one file: its state folder, and what only its head has."""
