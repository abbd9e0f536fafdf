"""How long steps take, and what follows: what of their time prompts may have beside outputs, and how large steps are.

Values of steps that ran come in, bounds come out; `schedule` and the cores ask. No clock: times are arguments.
"""
