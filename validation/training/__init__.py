"""Training of the learned models from public training tables; test tables cannot be opened from here."""
