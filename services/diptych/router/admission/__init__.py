"""Whether a request may begin now, waits in a fair line, or is refused with the time to come back."""
