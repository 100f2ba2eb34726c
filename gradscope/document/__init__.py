"""What is shown, as text before it is known where, and the terminal, Markdown and HTML that show it.

A profile, a comparison, a fix, a fit and a check each build one :class:`~gradscope.document.parts.Document`; what shows
it knows nothing of layers.
"""
