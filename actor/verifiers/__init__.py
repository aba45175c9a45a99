"""What a completion's final answer is, and whether it is right."""
