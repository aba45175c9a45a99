"""What every process of a run does: start, watch itself, wait for the lease, ask its card, end its children."""
