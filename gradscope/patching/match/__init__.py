"""What a recorded step holds that a recipe can replace: tools to read its graph, and one matcher a pattern."""
