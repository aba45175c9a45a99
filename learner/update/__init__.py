"""From a batch to new weights."""
