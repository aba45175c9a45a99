"""`export`: what a run trained, in the formats that other programs read."""
