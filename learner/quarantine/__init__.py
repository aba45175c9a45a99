"""Updates that are refused, and how to look at them later."""
