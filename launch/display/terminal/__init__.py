"""Answers of a run in a terminal."""
