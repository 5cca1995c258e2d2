"""x"""

MUTANTS = {}
