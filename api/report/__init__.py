"""How results of several predictions print."""
