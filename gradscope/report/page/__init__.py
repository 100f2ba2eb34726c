"""The report page: one offline HTML file with an interactive flame graph.

``data`` turns a run into compact columns, ``bundle`` joins the modules below ``web/src`` into one script, ``writer``
puts both into the page.
"""

from gradscope.report.page.writer import HTML_HEAD, to_html

__all__ = ["HTML_HEAD", "to_html"]
