"""A cache in host memory of which the device has rows, by callbacks of the host, and its errors."""

from support import suites


class TestHotRows(suites.HotRows):
    implementation = "xla"


class TestMisuse(suites.HotRowsMisuse):
    """Errors."""
