"""The contract between actor and learner: messages, their bytes, the sockets that carry them.

README.md beside this file is the wire specification; messages.py states the records, codec.py the bytes, transport.py
the two ends. Imports nothing else of ours, and no torch.
"""
