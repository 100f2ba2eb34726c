"""The runs of several ranks of one program, side by side: who works longest, and who waits for whom."""

from gradscope.ranks.document import ranks_document, ranks_sections
from gradscope.ranks.merged import Merged, merge

__all__ = ["Merged", "merge", "ranks_document", "ranks_sections"]
