"""What Inductor knows of the kernels that it generates: of which nodes each is made, and where these are from.

It is never imported for this: it takes a second.
"""

COMPILE_FX = "torch._inductor.compile_fx"
CONFIG, FUNCTORCH_CONFIG = "torch._inductor.config", "torch._functorch.config"
DEBUG = "torch._inductor.debug"
PATTERNS = "torch._inductor.pattern_matcher"
