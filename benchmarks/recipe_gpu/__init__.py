"""Every recipe on a GPU beside eager torch, SDPA's backends, torch.compile and Liger: ``python benchmarks/recipe_gpu``.

Read problem.py first: what is compared. ops/ has one file an op; measure.py times them; supervise.py keeps one way's
crash from ending the others'.
"""
