"""What ``benchmarks/recipes.py`` measures: each recipe beside what it replaces."""
