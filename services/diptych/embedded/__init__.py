"""`Engine`: a whole engine inside a Python program, without HTTP, bootstrap or router. Its door is `diptych.engine`.

Its schedulers are those of workers, and it chooses among them as a router does.
"""
