"""The options of a worker's scheduler, what follows from them, and the form in which they reach its process."""
