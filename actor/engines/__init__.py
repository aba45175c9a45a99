"""How completions are sampled: our own decode loop, or vLLM."""
