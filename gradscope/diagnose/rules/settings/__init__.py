"""Rules about switches and layouts that cost time: of torch, an optimizer, the environment; no code of the model."""
