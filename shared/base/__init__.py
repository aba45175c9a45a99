"""The frozen base: built from a checkpoint, kept in a cache, loaded and checked."""
