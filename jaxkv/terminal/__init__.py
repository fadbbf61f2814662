"""Helpers that the commands share: options, messages, progress bars, streams, result files, and checks of memory."""
