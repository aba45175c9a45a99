"""Sends the metrics of a run to a tracker."""
