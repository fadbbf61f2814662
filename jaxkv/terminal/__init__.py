"""Helpers that the commands share: messages, progress bars, streams, result files, and checks of memory."""
