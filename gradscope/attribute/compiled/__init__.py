"""Time of compiled code, by the layers and lines that it was compiled from."""
