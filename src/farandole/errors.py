"""Exceptions that are meant for a person."""


class Interrupted(BaseException):
    """Ctrl-C or a request to end, with what is left behind and what to do next."""


class FarandoleError(Exception):
    """What happened, where, and what to do about it."""
