"""The actor: Order -> decode P x G completions -> score them -> FilledOrder. It keeps nothing that a restart needs."""
