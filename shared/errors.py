"""Errors that a user can fix. They may be raised anywhere; the entry point shows one sentence and exits with code 2.

UserError
|-- ConfigError       a key, a type, a range, a preset
|-- RunDirError       a run directory: missing, unwritable, full, in use
|-- ModelError        a model folder or hub id that cannot be loaded
|-- DataError         a data file, a column
|-- DamageError       a damaged file of the run, which is never repaired in silence
|-- RewardError       the user's reward function
`-- TrainingStopped   a step that must not be used: verifier error, mismatch, values that are not finite
"""


class UserError(Exception):
    """The message is one sentence: what was found, what was expected, what to do."""


class ConfigError(UserError):
    """The configuration is wrong."""


class RunDirError(UserError):
    """The run directory cannot be used."""


class ModelError(UserError):
    """The model cannot be loaded."""


class DataError(UserError):
    """The tasks cannot be read."""


class DamageError(UserError):
    """A file of the run is damaged."""


class RewardError(UserError):
    """The user's reward function cannot be used."""


class TrainingStopped(UserError):
    """Training was stopped before a wrong update was applied."""


class RankLost(Exception):
    """Another process of the same learner has ended: not an error of this one."""


def in_words(error: BaseException) -> str:
    """Type and first line of the message of an exception; the message may have pages or be empty."""
    said = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {said[0][:200].rstrip('.')}" if said else name
