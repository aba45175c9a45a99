"""What a run takes of a card before it starts, from the code of both processes."""
