"""Rules about number formats: autocast's casts, and float16."""
