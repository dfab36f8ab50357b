"""Stands for vLLM in TRL's imports: what its weight transfer calls, over gloo instead of NCCL."""

__version__ = "0.30.0"
