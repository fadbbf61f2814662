"""Plans of attention: the division of a step's requests, by XLA or by kernels."""
