"""Translation validation: what a compiled attention computes is held against what the spec means.

Three readings of one computation. The tables that a kernel is about to execute hold each pair of
the graph once, and no other. In float64 outputs and gradients are those of the definition but for
roundings: values are random, so that a pair too many, too few or twice changes its query's output,
and a weight of the wrong query is named. And in float32 a backend may err twice as much as the
definition does in the same type.

The first two take a fraction of the time, so that every compile does them at a second length, at
which tables have several blocks. Every pair of a short sequence is examined; of a long one,
queries are sampled, but tables are read as far as their pairs can be listed.
"""
