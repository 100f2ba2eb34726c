"""Attention: softmax(scale · q kᵀ + what is added to the scores) v, without ever holding all scores."""
