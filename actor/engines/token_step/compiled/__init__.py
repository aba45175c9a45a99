"""A token step in C, compiled on the machine that decodes."""
