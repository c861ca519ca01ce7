"""Watch a cluster: what the head's Prometheus reads from whom, when it alerts, and what this machine tells it."""
