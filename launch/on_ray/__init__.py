"""Learner and actors on a Ray cluster, on whatever nodes have room for them."""
