"""Memory: from the allocators' events to blocks, their owners and categories, and the peak."""
