"""Finds what recipes can replace in a model, puts them in, proves them, and takes them out again."""
