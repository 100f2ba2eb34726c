"""A bias, and the Gaussian error linear unit of the sum."""
