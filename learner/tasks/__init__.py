"""From a data set to prompts."""
