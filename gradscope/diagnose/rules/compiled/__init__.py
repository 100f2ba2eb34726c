"""Rules about code under torch.compile: what Dynamo tells of its compilations."""
