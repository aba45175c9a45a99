"""The window: a local web page that shows runs, and nothing else on the network."""
