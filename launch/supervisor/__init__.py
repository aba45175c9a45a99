"""Starts the processes of a run, restarts actors, and ends all processes together."""
