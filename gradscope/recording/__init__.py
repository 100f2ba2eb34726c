"""One run of a model as a graph of torch calls: what is written down while the user's code runs, and by what."""
