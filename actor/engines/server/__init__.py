"""vLLM behind a URL as the engine."""
