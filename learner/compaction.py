"""What the journal may give up after a checkpoint.

    journal.keep = "all"           nothing: `replay` goes from step 0
    journal.keep = "checkpoints"   what is older than the newest `checkpoint.keep` checkpoints: `replay` goes from the
                                   oldest of them, and the journal holds the records of checkpoint.keep * every steps

While there are fewer checkpoints than that, nothing goes. The best checkpoint does not count: it may be as old as the
run. A segment ends with each checkpoint, so that it can go as a whole.
"""

from learner.checkpoint import CheckpointStore
from learner.recorder import JournalRecorder
from shared.config.processes import JournalConfig


class Compaction:
    """Keeps the journal as small as it was asked to be."""

    def __init__(self, config: JournalConfig, checkpoints: CheckpointStore, recorder: JournalRecorder) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.recorder = recorder

    def after_checkpoint(self, step: int) -> None:
        """To be called once the checkpoint of this step is durable."""
        self.recorder.checkpointed(step)
        if self.config.keep == "checkpoints":
            self.recorder.forget_before(self.checkpoints.oldest_kept(step))
