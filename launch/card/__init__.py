"""How much of a card a run needs, worked out before it starts from the code of both processes."""
