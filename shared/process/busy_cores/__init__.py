"""How a process computes while other processes keep its cores busy. It begins with `watch_cores` in watch.py."""
