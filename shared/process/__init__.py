"""What every process of a run does: start, watch itself, wait for the lease, end its children."""
