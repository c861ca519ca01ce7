"""Exceptions whose messages are shown to the user."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM; its message says what is left behind and what to do next."""


class FarandoleError(Exception):
    """Its message says what happened, where, and what to do."""
