"""What a run of a playbook does, as it happens: its events in a file, and what a person sees of them."""
