"""What a person sees while a run trains and when it ends."""
