"""Exit statuses and the handling of errors that every command line shares."""
