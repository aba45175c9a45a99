"""What is: one module a subject, a frozen record and the function that fills it from this machine."""
