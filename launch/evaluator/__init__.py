"""Held-out accuracy of a run in progress, by a process of its own."""
