"""Formats of MLA entries only: a latent and a rotary part, quantised in tiles whose scales are part of the entry."""
