"""Figures for notebooks: plotly's icicle of a run, and its memory over the step.

``flame.py`` turns a run into frames, ``prune.py`` leaves out what is too small to see and says so, ``icicle.py`` makes
a plotly figure of frames, ``memory.py`` draws the timeline. plotly is loaded when a figure is made, not before.
"""
