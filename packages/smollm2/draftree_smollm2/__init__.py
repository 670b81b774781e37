"""Files alone: the default model of draftree, and its draft head."""
