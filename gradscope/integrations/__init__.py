"""gradscope in other people's training loops: ``gradscope.integrations.transformers`` and ``.lightning``.

Each needs its library, which gradscope does not install. docs/trainers.md shows them.
"""
