"""Runs the user's code and takes notes: hooks, steps under torch.profiler, the survey step, the environment."""
