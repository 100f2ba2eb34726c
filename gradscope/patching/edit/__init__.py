"""A match of the recorded step as an edit of the user's source, or a refusal with its reason."""
