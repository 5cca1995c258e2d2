"""x"""

DIRECTED = {}
