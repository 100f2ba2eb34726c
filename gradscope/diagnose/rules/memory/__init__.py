"""Rules about what is kept, copied, filled or left behind."""
