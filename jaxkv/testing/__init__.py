"""Random calls of every operation, and checks of their results and of every byte that they must not touch."""
