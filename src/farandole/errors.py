"""The one kind of exception that is meant for a person."""


class FarandoleError(Exception):
    """What happened, where, and what to do about it."""
