"""Names of the rows that ``capture`` writes into a trace and ``trace`` reads back.

A marker is ``gradscope:<kind>:<number>``. The number joins the row to what ``capture`` noted in Python at that moment.
"""

from __future__ import annotations

PREFIX = "gradscope:"
CALL = "gradscope:call:"  # one module call; number: row of the CallTable
BACKWARD = "gradscope:backward:"  # one entry into the autograd engine; number: twice its order, +1 for create_graph
RECOMPUTE = "gradscope:recompute:"  # forward run again by checkpointing; number: 0
STEP = "gradscope:step:"  # empty; the boundary after step <number>
LINE = "gradscope:line:"  # one torch function called by user code; number: row of the survey's LineTable
FLOP = "gradscope:flop:"  # around one aten op; number: its floating-point operations
HOOK = "gradscope:hook:"  # around one hook of the user's on a tensor, inside a backward pass; number: 0
PARAMETER = "gradscope:parameter:"  # empty, inside an AccumulateGrad; number: index of the parameter
OWN = "gradscope:own:"  # around what gradscope itself does in a step; number: 0
SEEN = "gradscope:seen:"  # empty; the moment at which the tensors of that number were seen alive
GRAPH = "gradscope:graph:"  # in the row that a graph of Inductor's writes when it runs; number: of the GraphNote
