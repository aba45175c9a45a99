"""A decoder's layers without their modules, and what they compute between their products."""
