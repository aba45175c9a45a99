"""The actor: Order -> decode P x G completions -> score them -> Groups. It keeps nothing that a restart needs."""
