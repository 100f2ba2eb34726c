"""Training steps of many structures, whose bytes and times are both known; one declaration each."""
