"""The unified role: prompts and outputs on one worker, and either half of a pair. Pure but for `main` and `scheduler`.

Its core is the prefill core and the decode core over one cache. It is that of every worker, whose command is here too.
"""
