"""Streaming kernels for SGLang's W4AFP8 low-latency MoE path, as a plugin of the engine."""

__version__ = "0.1.0"
