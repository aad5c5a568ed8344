"""The command line: a file a command, parse → call → emit."""
