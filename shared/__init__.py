"""What both processes agree on: configuration, policy, files of a run, seeds, process life. Imports `protocol`."""
