"""What answers the model between its turns: environments and tools, in processes that can be killed."""
