"""Faults a user can mend. Raised anywhere, shown as one sentence at the process's edge with exit code 2.

UserError
|-- ConfigError       a key, a type, a range, a preset
|-- RunDirError       a run directory: missing, unwritable, full, in use
|-- ModelError        a checkpoint folder or hub id that cannot be loaded
|-- DataError         a data file, a column
|-- DamageError       a file of the run that is corrupt beyond what may be repaired in silence
|-- RewardError       the user's reward function
`-- TrainingStopped   a step that must not be built upon: verifier fault, mismatch, values that are not finite
"""


class UserError(Exception):
    """One sentence: what was got, what was expected, what to do."""


class ConfigError(UserError):
    """The configuration does not hold."""


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
    """Training stopped on purpose, before anything wrong was applied."""
