"""A run's numbers as one self-contained HTML page. Reads the journal, imports nothing heavy."""
