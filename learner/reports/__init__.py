"""What a step leaves in the run directory."""
