"""Who computes the micro-batches of a step."""
