"""Every operation in plain JAX."""
