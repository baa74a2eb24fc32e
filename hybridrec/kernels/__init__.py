"""Lookup and fused row update on rows that sit in slots."""
