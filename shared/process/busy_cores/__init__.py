"""How a process computes while other processes keep its cores busy."""
