"""What a measurement costs, against the published algorithm and against the machine's own matrix products."""
