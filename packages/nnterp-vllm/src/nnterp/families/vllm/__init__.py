"""Families of vLLM: what is particular about its implementation of an architecture."""
