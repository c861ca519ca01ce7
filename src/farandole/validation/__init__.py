"""The validation of a cluster: which jobs run, how their results are judged, and the report."""
