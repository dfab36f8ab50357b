"""The tags around the thoughts of a reasoning model."""

OPEN, CLOSE = "<think>", "</think>"
