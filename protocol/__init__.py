"""The wire between frontends and the engine core: typed messages, their codec and their sockets."""
