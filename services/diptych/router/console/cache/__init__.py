"""How well the prefix caches do, beside the ceiling of an infinite one, and what is in them most."""
