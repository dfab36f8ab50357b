"""Wire between frontends and the engine core.

It consists of typed messages, their codec and their sockets.
"""
