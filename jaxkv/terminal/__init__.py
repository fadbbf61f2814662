"""What the programs share: messages, progress, streams, files of results, and checks of memory."""
