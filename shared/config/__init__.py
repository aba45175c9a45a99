"""Every configuration key, its range and its meaning, and how a file becomes a configuration."""
