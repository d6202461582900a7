"""The one error users are meant to read."""


class DataError(ValueError):
    """Wrong input or an unusable place: the message is one line that says what to do."""
