"""What keeps a policy close to what it learned in the stage before."""
