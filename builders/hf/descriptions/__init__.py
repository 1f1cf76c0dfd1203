"""Descriptions of quantised checkpoints: one file per writer, and where to look for them."""
