"""Which tasks come next."""
