"""What one card can show: the sections of `benchmarks.gpu_suite`, and what a machine without network needs for them."""
