"""Families of transformers: what is particular about its implementation of an architecture."""
