"""The learner: orders -> groups, journaled -> batch -> update -> next policy version. The only process with state."""
