"""Where entries lie in the flat buffer: addresses, slots, and access to encoded entries at slots."""
