"""Every configuration key with its range and meaning, and how a file becomes a configuration."""
