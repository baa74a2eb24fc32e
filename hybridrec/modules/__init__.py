"""The collections that users write into their models."""
