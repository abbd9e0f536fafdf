"""What a simulation came to: one summary a policy, as a table, as JSON and as plots. Pure."""
