"""The cluster's certificate authority."""
