"""How much a body would become in memory, told from its bytes before anything is made of them.

Pure: one file for each encoding, JSON and protobuf. The count of any other form that clients send belongs here, too.
"""
