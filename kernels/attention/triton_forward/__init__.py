"""Output and logsumexp in one Triton kernel."""
