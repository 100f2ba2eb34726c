"""Dynamo, from the moment that the program has it: what it leaves alone, when it is entered, and what it compiles.

It is never imported for this: it takes a second. Below a function that torch.compile made Dynamo looks at every frame,
also at those behind a graph break and of hooks, and compiles it.

Source: torch/_dynamo/eval_frame.py, decorators.py (``disable``) and callback.py, as of torch 2.11 to 2.14.
"""

DYNAMO = "torch._dynamo"
