"""Rules about the loop around the model: batches, reads of tensors, gradients that are cleared or that nobody uses."""
