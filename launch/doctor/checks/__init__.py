"""What the facts mean: one module a subject, one function a check. `examine.py` lists them all."""
