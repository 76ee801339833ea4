"""The errors that users meet: each message gives the value, the cause and the remedy."""


class UsageError(ValueError):
    """Something asked for cannot be done; refused before it costs anything."""


class TrainingError(RuntimeError):
    """A run that had started cannot go on: the message names the step and the microbatch."""
