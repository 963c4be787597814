"""The train step compiled ahead of time for TPUs that this machine does not have, and read."""
