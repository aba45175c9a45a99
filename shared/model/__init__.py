"""The policy: the quantised base, the adapter, and what both processes compute with them."""
