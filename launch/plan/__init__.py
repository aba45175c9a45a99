"""What a run needs before it starts: memory of both processes, and time on this machine."""
