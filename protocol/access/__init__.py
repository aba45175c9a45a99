"""Who may speak: keys, the list of allowed ones, and what a connection may cost."""
