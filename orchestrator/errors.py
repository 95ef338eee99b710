"""The one exception that is meant for the person at the keyboard."""


class UserError(Exception):
    """Something the user gave is wrong; the message says what, where and what to do. Exit status 2."""
