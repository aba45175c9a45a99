"""What a run is doing, and what would help."""
