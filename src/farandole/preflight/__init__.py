"""What stands against a run, found before anything is touched."""
