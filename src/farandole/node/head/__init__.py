"""The head's command: run programs on the cluster's nodes, show, stop and fetch them."""
