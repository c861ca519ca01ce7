"""Running programs on the nodes: what the control machine does, and the command on the head."""
