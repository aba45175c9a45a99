"""What every process of a run does: start, watch itself, take turns, end its children."""
