"""From a group to weighted tokens to the loss."""
