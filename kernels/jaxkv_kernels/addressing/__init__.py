"""Where entries lie in the flat buffer: addresses, slots, and functions that read and write encoded entries at slots.
"""
