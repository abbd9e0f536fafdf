"""What a platform is made of, decided from a few answers: its processes on this machine, its values in a cluster.

Pure: answers in, plans out. Here belongs what a command decides before it starts or writes anything.
"""
