"""The fleet as the console shows it: what workers tell of themselves, their links and steps, and what follows."""
