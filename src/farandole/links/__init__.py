"""The connections between the nodes: measured by a program on each node, judged on the control machine."""
