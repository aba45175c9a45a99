"""One token of each row through the decoder: its layers, and the kinds of products that few rows take."""
