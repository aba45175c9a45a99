"""What both processes must agree on: configuration, policy, adapter files, seeds, run directory. Imports `protocol`."""
