"""What the Triton kernels of attention share: a tile of scores, its band, and what dropout keeps of it."""
