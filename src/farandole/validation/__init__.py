"""What proves a cluster: which jobs run, what they mean, and the report."""
