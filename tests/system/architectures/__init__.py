"""Tiny models of the architectures that people train, from transformers and timm; no weights."""
