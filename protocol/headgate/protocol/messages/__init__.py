"""The messages of the two links, and what stands inside them: queries, steps, DAGs."""
