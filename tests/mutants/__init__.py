"""Small faults planted in the files that decide numbers, which the fast tests have to find."""
