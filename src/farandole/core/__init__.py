"""What everything else stands on: errors, findings, causes, text, files."""
