"""Say what a model and a load need, before GPUs are bought and while a platform runs."""
