"""C code for a CPU: how it is built and loaded, and the functions that an update calls."""
