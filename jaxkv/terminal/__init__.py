"""What programs print, write and may take: messages, progress, streams, files and memory."""
