"""The causes of failures, found in logs and runs."""
