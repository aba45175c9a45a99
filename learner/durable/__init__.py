"""What survives a crash: the journal and the checkpoints."""
