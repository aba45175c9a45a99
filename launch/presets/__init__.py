"""Configurations to start from, and how they are found."""
