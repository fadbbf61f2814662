"""Where entries lie in the flat buffer: addresses, slots, and encoded entries read and written at slots."""
