"""Runs verifiers in worker processes that can be killed."""
