"""The model in memory: files, facts, graphs and edits, patterns, the plan, and the base of every pass."""
