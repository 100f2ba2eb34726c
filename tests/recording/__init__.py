"""Tests of gradscope.recording."""
