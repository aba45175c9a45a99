"""The run directory and its files."""
