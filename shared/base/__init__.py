"""The frozen base: built from a model's files, kept in a cache, loaded and checked."""
