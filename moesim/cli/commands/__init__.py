"""One module per command, named after it; groups of commands are folders."""
