"""The commands of `leandit`, one per file: arguments, text for people, data for --json."""
