"""Rules of tasks in the simulation of signals: what starts, restarts and stops tasks (I29).

From the inside out: `plans` (the rules of a task, what users ask for by hand), `books` (what is asked for, and with
what a task has started), `checker` (the judge of all of signals), `drawing`, `directed`, `mutants`. Neither books nor
checker know anything of the code under test.
"""
