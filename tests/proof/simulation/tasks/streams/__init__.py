"""Streams of tasks in the simulation of tasks: what their triggers fire, what their handlers do, and what is right.

The modules, from the inside out: `plans` (what a seed means), `source` (the trigger), `handling` (the operator),
`books` (what is known of one stream, with the rules of I20 to I22 stated a second time), `checker`, `directed`,
`mutants`.
"""
