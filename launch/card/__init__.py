"""What a run takes of a card, before it starts: the code of both processes, run over tensors without values."""
