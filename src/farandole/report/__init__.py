"""The page, the comparison and the Markdown that are made from a validation's result.json."""
