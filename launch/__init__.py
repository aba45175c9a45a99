"""What a person types: run, resume, replay, eval, generate; starting, watching and stopping the two processes."""
