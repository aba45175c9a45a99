"""Access control: keys, the list of accepted keys, and limits on what a connection may cost."""
