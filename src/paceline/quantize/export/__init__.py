"""Quantised models as files."""
