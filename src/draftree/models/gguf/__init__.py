"""GGUF files: what they hold, and what they must hold before an engine gets them."""
