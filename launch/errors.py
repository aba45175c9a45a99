"""What can go wrong with the processes of a run that is not the user's to mend."""


class ProcessFailed(Exception):
    """A process of the run crashed; the message holds its last log lines."""
