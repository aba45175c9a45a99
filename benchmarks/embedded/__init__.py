"""Makes the embedded model again: corpus, tokenizer, pretraining, accuracy."""
