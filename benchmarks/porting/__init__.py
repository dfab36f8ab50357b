"""Shared code of the model porting tools."""
