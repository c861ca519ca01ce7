"""Running playbooks, and what their plugins share."""
