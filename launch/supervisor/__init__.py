"""Starts the processes of a run, restarts actors, ends everything together."""
