"""`Engine`: a whole engine inside a Python program, without HTTP, bootstrap or router."""
