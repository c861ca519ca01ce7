"""Ask a node in one round trip what all modules of a run would find there.

A run that changes nothing spends most of its time on starting Python on every node for every task. So a run records
which modules it calls on a host, and with which arguments. The next run sends these calls at the beginning, together
and in check mode, to one process on the node. A task that then makes exactly such a call, of which the module has said
that it would change nothing, takes this answer instead of asking again.

Nothing that an earlier run has seen is trusted: the record contains only questions, and the answers are of this run.
The first change on a host discards its answers.
"""
