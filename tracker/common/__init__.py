"""What every package needs: errors, texts, values of options, files and locks, command lines."""
