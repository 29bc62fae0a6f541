"""The work of the commands for operators. Functions return plain values and print nothing."""
