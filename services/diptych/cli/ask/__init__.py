"""Ask a server that runs: in a talk, once, again what a log says, or to judge what it answers."""
