"""The cluster as its inventory and its state folder describe it."""
